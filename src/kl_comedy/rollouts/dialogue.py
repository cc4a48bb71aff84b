"""Dialogues: turns of the policy, drawn by any sampler, and what an environment answers between them.

    prompts -> generate (first turns) -> environment -> observations -> generate (next turns) -> ... -> rollouts

A :class:`Dialogue` stands above ``generate``, so that no sampler knows of it. Every turn is drawn from the ids of all
turns before it, as they were drawn: the learner trains on what was sampled, token by token. The ids of an observation
are those of its text alone. A dialogue ends where the environment says so, where a turn is cut at its limit, after
``environment.turns`` turns, where no whole turn has room any more, or where the environment fails. It never ends with
an observation, which nobody would read.

Where a chat template renders earlier turns anew, each turn is drawn from a rendering of the whole dialogue. What was
sampled is still what is trained: a rendering that does not go on from what was read before begins a row of the rollout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kl_comedy.config.schema import EnvironmentConfig
from kl_comedy.errors import RunFailed
from kl_comedy.models import LoadedModel
from kl_comedy.records import FOREIGN_VERSION, KeptSets, Problem, Prompt, Rollout, Step
from kl_comedy.registry import ENVIRONMENTS
from kl_comedy.rewards.environments import Answers
from kl_comedy.rewards.pool import Failure, Turn
from kl_comedy.rollouts.base import Sampling
from kl_comedy.rollouts.hf import check_request, end_tokens

Frame = tuple[str, str]
"""The text before and after an observation: what ends the policy's turn and begins the next one in a chat template."""


class Renderer(Protocol):
    """Renders whole dialogues (:class:`~kl_comedy.data.prompts.TurnRenderer`)."""

    def control_token(self, text: str) -> str | None:
        """A special token that ``text`` spells."""

    def prompts(self, dialogues: Sequence[tuple[Problem, Sequence[tuple[str, str]]]]) -> list[tuple[int, ...]]:
        """The ids that the next turn of each dialogue is drawn from, by its turns and what each was answered."""


def turn_seed(seed: int, turn: int) -> int:
    """The seed of the turns with number ``turn`` of all dialogues of a call; that of the first is the call's own."""
    if turn == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/turn/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def turn_tokens(settings: EnvironmentConfig, sampling: Sampling) -> int:
    """The longest turn of the policy, in tokens; ``sampling`` bounds the whole dialogue."""
    if settings.turn_tokens is None:
        return max(1, sampling.max_new_tokens // settings.turns)
    return min(settings.turn_tokens, sampling.max_new_tokens)


class Dialogue:
    """A sampler of dialogues: ``backend`` draws the turns of the policy, ``environment`` answers them.

    It is a :class:`~kl_comedy.rollouts.base.RolloutBackend` with whatever else ``backend`` has. ``generate`` is called
    on every rank that calls the backend's, and all of these see the same rollouts.
    """

    def __init__(
        self,
        backend: Any,
        environment: Answers,
        loaded: LoadedModel,
        settings: EnvironmentConfig,
        frame: Frame = ("", ""),
        renderer: Renderer | None = None,
    ) -> None:
        """``renderer``: for a chat template that has no text between turns, and renders earlier ones anew."""
        self._backend = backend
        self._environment = environment
        self._loaded = loaded
        self._settings = settings
        self._parts = tuple(ENVIRONMENTS.get(settings.name).facts.get("parts", ()))
        self._renderer = renderer
        self._text = ObservationText(loaded, settings.observation_tokens, frame)

    def __getattr__(self, name: str) -> Any:
        """Everything but ``generate`` is the backend's: version, weights, folders, restarts."""
        return getattr(self._backend, name)

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`~kl_comedy.rollouts.base.RolloutBackend`; ``sampling.max_new_tokens`` bounds the whole dialogue.

        Raises :class:`RunFailed` where the environment failed in every dialogue of the call.
        """
        if not prompts:
            return []
        # Of the whole dialogue, before its first token: later turns are longer than the first.
        check_request(self._loaded, prompts, sampling, group_size)
        limit = turn_tokens(self._settings, sampling)
        of_turn = replace(sampling, max_new_tokens=limit)
        drawn = self._backend.generate(prompts, group_size=group_size, sampling=of_turn, seed=seed)
        dialogues = [_Open(rollout, self._parts) for rollout in drawn]
        unfinished = dialogues
        for turn in range(self._settings.turns):
            if turn > 0:
                # Each has a prefix of its own now, so that each is a group.
                prefixes = [dialogue.prefix() for dialogue in unfinished]
                drawn = self._backend.generate(prefixes, group_size=1, sampling=of_turn, seed=turn_seed(seed, turn))
                for dialogue, rollout in zip(unfinished, drawn, strict=True):
                    dialogue.add_turn(rollout)
            # A turn that was cut is not answered: what it says is not whole.
            whole = [dialogue for dialogue in unfinished if dialogue.stop_reason != "length"]
            room = sampling.max_new_tokens - limit
            is_last = turn == self._settings.turns - 1
            unfinished = self._answered(whole, room=-1 if is_last else room)
            if not unfinished:
                break
        failures = [dialogue.failure for dialogue in dialogues if dialogue.failure is not None]
        if len(failures) == len(dialogues):
            name = self._settings.name
            raise RunFailed(f"environment {name!r} failed in each of {len(dialogues)} dialogues: {failures[0]}")
        return [dialogue.rollout(self._loaded.tokenizer) for dialogue in dialogues]

    def _answered(self, dialogues: Sequence[_Open], *, room: int) -> list[_Open]:
        """The dialogues that go on, with their observations. ``room``: tokens that one may have before a turn."""
        if not dialogues:
            return []
        turns = [
            Turn(self._settings.name, dialogue.prompt.problem, dialogue.turn_text, dialogue.state)
            for dialogue in dialogues
        ]
        answered = []
        for dialogue, answer in zip(dialogues, self._environment.answer(turns), strict=True):
            if isinstance(answer, Failure):
                dialogue.fail(answer)
                continue
            dialogue.take(answer)
            if answer.done:
                continue
            observation = self._text.ids(answer.observation, last_id=dialogue.ids[-1])
            if isinstance(observation, Failure):
                dialogue.fail(observation)
                continue
            answered.append((dialogue, answer.observation, observation))
        if self._renderer is not None:
            return self._rendered_anew(self._renderer, [(dialogue, text) for dialogue, text, _ in answered], room)
        going_on = []
        for dialogue, _, observation in answered:
            if len(dialogue.ids) + len(observation) > room:
                dialogue.stop_reason = "length"
            else:
                dialogue.observe(observation)
                going_on.append(dialogue)
        return going_on

    @staticmethod
    def _rendered_anew(renderer: Renderer, answered: Sequence[tuple[_Open, str]], room: int) -> list[_Open]:
        """The dialogues that go on, each with what its next turn is drawn from."""
        renderable = []
        for dialogue, observation in answered:
            control = renderer.control_token(dialogue.turn_text) or renderer.control_token(observation)
            if control is not None:
                # Rendered as text it would become the token itself: anyone could end turns and begin others.
                dialogue.fail(Failure(f"control token: a turn or its observation spells {control}"))
                continue
            dialogue.exchanges.append((dialogue.turn_text, observation))
            renderable.append(dialogue)
        if not renderable:
            return []
        going_on = []
        prompts = renderer.prompts([(dialogue.prompt.problem, dialogue.exchanges) for dialogue in renderable])
        for dialogue, ids in zip(renderable, prompts, strict=True):
            already_read = dialogue.prefix().token_ids
            goes_on = ids[: len(already_read)] == already_read
            observation_ids = ids[len(already_read) :] if goes_on else ()
            # What a turn is drawn from, and what is trained of the dialogue, have the same bound.
            tokens = max(len(ids) - len(dialogue.prompt.token_ids), len(dialogue.ids) + len(observation_ids))
            if tokens > room:
                dialogue.stop_reason = "length"
                continue
            if goes_on:
                dialogue.observe(observation_ids)
            else:
                dialogue.restart(ids)
            going_on.append(dialogue)
        return going_on


class _Open:
    """A dialogue that grows, from its first turn on."""

    def __init__(self, first_turn: Rollout, parts: Sequence[str]) -> None:
        self.prompt = first_turn.prompt
        self.state: str | None = None
        self.failure: Failure | None = None
        self.ids: list[int] = []
        self.exchanges: list[tuple[str, str]] = []
        self._restarts: list[tuple[int, tuple[int, ...]]] = []
        self._group_id = first_turn.group_id
        self._logps: list[float] = []
        self._versions: list[int] = []
        self._trained: list[bool] = []
        self._tops: list[tuple[Tensor, Tensor]] = []
        self._kept: list[KeptSets] = []
        self._turn_ends: list[int] = []
        self._turn_parts: dict[str, list[float]] = {name: [] for name in parts}
        self.add_turn(first_turn)

    def add_turn(self, rollout: Rollout) -> None:
        """Append a turn of the policy."""
        self.turn_text = rollout.text
        self.stop_reason = rollout.stop_reason
        self.ids += rollout.completion_ids
        self._logps += rollout.logps
        self._versions += rollout.versions
        self._trained += [True] * len(rollout.completion_ids)
        self._turn_ends.append(len(self.ids))
        # A turn that earns no part of a name, or is not answered, has 0 of it.
        for values in self._turn_parts.values():
            values.append(0.0)
        if rollout.sampler_top is not None:
            self._tops.append(rollout.sampler_top)
        if rollout.kept is not None:
            self._kept.append(rollout.kept)

    def take(self, step: Step) -> None:
        """Take state and parts of an answer to the last turn."""
        self.state = step.state
        for name, value in step.parts.items():
            self._turn_parts[name][-1] = value

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.ids += ids
        self._logps += [0.0] * len(ids)
        self._versions += [FOREIGN_VERSION] * len(ids)
        self._trained += [False] * len(ids)
        if self._tops:
            ids_TK, logp_TK = self._tops[-1]
            # Nothing reads them: an environment's tokens are outside the mask.
            shape = (len(ids), ids_TK.shape[1])
            self._tops.append((torch.zeros(shape, dtype=ids_TK.dtype), torch.zeros(shape, dtype=logp_TK.dtype)))

    def restart(self, context: tuple[int, ...]) -> None:
        """Begin a row: the next turn is drawn from ``context``."""
        self._restarts.append((len(self.ids), context))

    def fail(self, failure: Failure) -> None:
        """End the dialogue without a verdict."""
        self.failure = failure
        self.stop_reason = "failed"

    def prefix(self) -> Prompt:
        """What the next turn is drawn from."""
        start, context = self._restarts[-1] if self._restarts else (0, self.prompt.token_ids)
        return replace(self.prompt, token_ids=(*context, *self.ids[start:]))

    def rollout(self, tokenizer: Any) -> Rollout:
        """The whole dialogue."""
        drawn_ids = [token for token, is_drawn in zip(self.ids, self._trained, strict=True) if is_drawn]
        sampler_top = None
        if self._tops:
            sampler_top = (torch.cat([ids for ids, _ in self._tops]), torch.cat([logps for _, logps in self._tops]))
        kept = None
        if self._kept:
            kept = KeptSets(*(torch.cat(parts) for parts in zip(*self._kept, strict=True)))
        return Rollout(
            prompt=self.prompt,
            group_id=self._group_id,
            completion_ids=tuple(self.ids),
            logps=tuple(self._logps),
            versions=tuple(self._versions),
            stop_reason=self.stop_reason,
            text=tokenizer.decode(drawn_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            trained=tuple(self._trained),
            restarts=tuple(self._restarts),
            turn_ends=tuple(self._turn_ends),
            turn_parts={name: tuple(values) for name, values in self._turn_parts.items()},
            sampler_top=sampler_top,
            kept=kept,
        )


class ObservationText:
    """Turns the text of an observation into ids. ``frame`` is trusted and may have special tokens; the text may not."""

    def __init__(self, loaded: LoadedModel, longest: int, frame: Frame) -> None:
        tokenizer = loaded.tokenizer
        self._tokenizer = tokenizer
        self._longest = longest
        before, after = frame
        self._before = self._encoded(before, special=True)
        self._after = self._encoded(after, special=True)
        # An end token in an observation would end the dialogue in the eyes of whoever reads the ids.
        self._control = frozenset([*end_tokens(loaded.causal, tokenizer), *tokenizer.all_special_ids])
        self._vocabulary = int(loaded.causal.config.get_text_config().vocab_size)

    def ids(self, text: str, *, last_id: int) -> tuple[int, ...] | Failure:
        """The ids of an observation after a turn that ends with ``last_id``, with its frame."""
        try:
            ids = self._encoded(text, special=False)
        except Exception as error:
            # The tokenizers library raises nothing more specific.
            return Failure(f"tokenizer: it has no tokens for the observation {text[:60]!r} ({error})")
        if len(ids) > self._longest:
            return Failure(
                f"too long: an observation of {len(ids)} tokens, environment.observation_tokens is {self._longest}"
            )
        if any(token in self._control or token >= self._vocabulary for token in ids):
            return Failure(f"control token: the observation {text[:60]!r} has an end token or another special one")
        before = self._before
        # The policy has ended its turn itself.
        if before[:1] == (last_id,):
            before = before[1:]
        return (*before, *ids, *self._after)

    def _encoded(self, text: str, *, special: bool) -> tuple[int, ...]:
        """The ids of ``text``; without ``special`` the name of a special token is ordinary text."""
        if not text:
            return ()
        options: Mapping[str, Any] = {"add_special_tokens": False, "split_special_tokens": not special}
        return tuple(self._tokenizer(text, **options)["input_ids"])
