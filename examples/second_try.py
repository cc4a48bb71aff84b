"""An environment as a plugin: it tells the policy that its answer is wrong, and lets it try again.

    kl-comedy train quickstart --plugin examples/second_try.py rollout.max_new_tokens=96 'rewards=[]' \
        'environment={name: second_try, turns: 2, turn_tokens: 40, weights: {solved: 1.0}}'
"""

import re

from kl_comedy.records import Step
from kl_comedy.registry import ENVIRONMENTS


@ENVIRONMENTS.register("second_try", source="examples/second_try.py", parts=("solved",))
class SecondTry:
    """Says when an answer is wrong; a right one earns 1 at the first try, and less at each later one."""

    def __init__(self, *, wrong: str = ";"):
        self.wrong = wrong

    def reset(self, problem):
        return {"answer": problem.answer, "tries": 0}

    def step(self, state, text):
        tries = state["tries"] + 1
        numbers = re.findall(r"\d+", text)
        if numbers[-1:] == [state["answer"]]:
            return Step(done=True, parts={"solved": 1.0 / tries})
        return Step(observation=self.wrong, state={**state, "tries": tries})
