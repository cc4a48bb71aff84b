"""The environment ``obedient``: it does what the policy's turn says, honest and hostile things."""

import os

from kl_comedy.records import Step
from kl_comedy.registry import ENVIRONMENTS


class Obedient:
    """Obeys the text of the policy's turn."""

    def reset(self, problem):
        return {"answer": problem.answer, "turns": 0}

    def step(self, state, text):
        turns = state["turns"] + 1
        state = {**state, "turns": turns}
        if text == "count":
            return Step(observation=f"{state['answer']} after {turns}", state=state, parts={"turns": 1.0})
        if text == "print":
            print("x" * 1_000_000)
            return Step(observation="printed", state=state)
        if text == "hang":
            while True:
                pass
        if text == "raise":
            raise ValueError("of the environment")
        if text == "exit":
            raise SystemExit(3)
        if text == "die":
            os._exit(9)
        faults = {
            "flood": Step(observation="x" * 1_000_000),
            "number": 5,
            "no text": Step(observation=b"82"),
            "other part": Step(parts={"turn": 1.0}),
            "nan": Step(parts={"turns": float("nan")}),
            "state": Step(state={1, 2}),
        }
        return faults.get(text, Step(done=True))


if "obedient" not in ENVIRONMENTS:
    ENVIRONMENTS.register("obedient", source="tests", parts=("turns",))(Obedient)


class Moody:
    """Fails on each turn that begins with an odd digit."""

    def reset(self, problem):
        return None

    def step(self, state, text):
        if text[:1] in ("1", "3", "5", "7", "9"):
            raise ValueError("not now")
        return Step(done=True)


if "moody" not in ENVIRONMENTS:
    ENVIRONMENTS.register("moody", source="tests")(Moody)
