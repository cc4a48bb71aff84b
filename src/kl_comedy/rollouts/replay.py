"""The ``replay`` backend: training on the recorded batches of another run, the same for every configuration.

The recorded log-probs must be of the tokens that the learner sees, so tokenizer, prompts, temperature, groups and
rewards are checked before a run begins. Evaluation samples afresh, in process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import Capabilities, Prompt, Rollout, Scored
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.base import Policy, Sampling
from kl_comedy.rollouts.hf import HFRollouts
from kl_comedy.rollouts.recording import Recording, Row, from_row

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig

KEY = "rollout.options.path"


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    path: str = option(MISSING, "what is replayed: a folder of parts, a .jsonl or a .parquet file")
    rewards: str = option(
        "recorded", "as they were judged then, or judged anew by this run's `rewards`", choices=("recorded", "again")
    )
    repeat: bool = option(False, "start over after the last batch")


@ROLLOUTS.register(
    "replay",
    source="rollouts that a run recorded",
    summary="Batches recorded by another run.",
    capabilities=Capabilities(recorded=True),
)
def build_replay(config: RolloutConfig, *, loaded: Policy) -> ReplayRollouts:
    """Build the backend. Raises :class:`UserError` for an unknown or missing option, or a wrong value."""
    options = parse_record(ReplayOptions, config.options, key="rollout.options")
    return ReplayRollouts(config, options, loaded=loaded)


class ReplayRollouts:
    """A backend whose training batches come from a recording; ``generate`` (evaluation) samples from the policy."""

    def __init__(self, config: RolloutConfig, options: ReplayOptions, *, loaded: Policy) -> None:
        self._config, self._options, self._loaded = config, options, loaded
        self._sampler = HFRollouts(loaded, batch_sequences=config.batch_sequences)
        self._recording: Recording | None = None
        self._prompts: Mapping[str, Prompt] = {}
        self.judges_again = options.rewards == "again"

    @property
    def version(self) -> int:
        """Of the weights that evaluation samples from."""
        return self._sampler.version

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """Fresh completions from the policy as it is now, as the ``hf`` backend draws them."""
        return self._sampler.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)

    def update_weights(self, version: int) -> None:
        self._sampler.update_weights(version)

    def close(self) -> None:
        self._sampler.close()

    def bind(self, prompts: Sequence[Prompt], *, weights: Mapping[str, float], updates: int, per_batch: int) -> None:
        """Open the recording and check it against this run, before anything is trained.

        ``weights`` are those of the run's rewards by label; the run makes ``updates`` updates, ``per_batch`` of them
        from each batch. Raises :class:`UserError` for the first thing that does not fit.
        """
        self._prompts = {prompt.problem.id: prompt for prompt in prompts}

        def check(batch: Sequence[Row]) -> None:
            self._check_groups(batch)
            self._check_tokens(batch)
            if not self.judges_again:
                _check_rewards(batch, weights)

        self._recording = Recording(Path(self._options.path), key=KEY, check=check)
        batches = len(self._recording)
        if batches * per_batch < updates and not self._options.repeat:
            raise bad_value(
                "train.steps",
                updates,
                f"at most {batches * per_batch}",
                f"the recording holds {batches} batches, and {per_batch} updates are made from each; "
                "rollout.options.repeat=true goes through it again",
            )

    def batch(self, number: int) -> list[Scored]:
        """The rows of one batch with their recorded rewards; the first again after the last."""
        if self._recording is None:
            raise RuntimeError("a replay is bound to the run's prompts before batches are read")
        rows = self._recording.read(number % len(self._recording))
        return [from_row(row, self._prompts[row["problem"]]) for row in rows]

    def _check_groups(self, batch: Sequence[Row]) -> None:
        """``prompts_per_batch`` groups, one after the other, of ``group_size`` completions of one problem."""
        prompts, size = self._config.prompts_per_batch, self._config.group_size
        place, first = batch[0]
        if len(batch) != prompts * size:
            sizes = {row["group"] for _, row in batch}
            raise UserError(
                f"{place}: batch {first['batch']} holds {len(batch)} completions in {len(sizes)} groups, and "
                f"rollout.prompts_per_batch {prompts} x rollout.group_size {size} is {prompts * size}"
            )
        for n, (place, row) in enumerate(batch):
            if row["group"] != n // size or row["problem"] != batch[n - n % size][1]["problem"]:
                raise UserError(
                    f"{place}: completion {n} of batch {row['batch']} is of group {row['group']}, problem "
                    f"{row['problem']!r}; expected group {n // size}, problem {batch[n - n % size][1]['problem']!r} "
                    f"(groups of rollout.group_size {size}, one after the other)"
                )
            if row["temperature"] != self._config.temperature:
                raise bad_value(
                    "rollout.temperature",
                    self._config.temperature,
                    f"{row['temperature']}",
                    f"{place}: the recorded log-probs are at that temperature",
                )

    def _check_tokens(self, batch: Sequence[Row]) -> None:
        """Prompts and completions are what this tokenizer, template and data make of them."""
        tokenizer = self._loaded.tokenizer
        entries = int(self._loaded.causal.config.get_text_config().vocab_size)
        for place, row in batch:
            prompt = self._prompts.get(row["problem"])
            if prompt is None:
                raise UserError(f"{place}: data.train has no problem {row['problem']!r}, which the recording asks")
            if tuple(row["prompt_ids"]) != prompt.token_ids:
                raise UserError(
                    f"{place}: the prompt of {row['problem']!r} has other token ids than this config gives it: "
                    "recorded with another tokenizer (model.source), template (data.prompt) or data (data.train)"
                )
            ids = row["completion_ids"]
            if max(ids) >= entries:
                raise UserError(f"{place}: token id {max(ids)}, and the model's vocabulary has {entries} entries")
            if tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) != row["text"]:
                raise UserError(
                    f"{place}: this tokenizer does not decode completion_ids to the recorded text; the recording was "
                    "made with another one (model.source, model.tokenizer)"
                )


def _check_rewards(batch: Sequence[Row], weights: Mapping[str, float]) -> None:
    """The recorded rewards are the weighted sum that this config's ``rewards`` describe."""
    for place, row in batch:
        parts: Mapping[str, Any] = row["parts"]
        names = sorted(name for name in parts if "/" not in name)
        hint = "rollout.options.rewards=again judges the recorded texts anew"
        if names != sorted(weights):
            raise UserError(
                f"{place}: judged by {', '.join(names) or '?'}, and rewards says {', '.join(weights)}; {hint}"
            )
        total = math.fsum(weight * parts[name] for name, weight in weights.items())
        if not math.isclose(total, row["reward"], rel_tol=1e-9, abs_tol=1e-9):
            raise UserError(
                f"{place}: reward is {row['reward']}, and its parts under the weights of rewards sum to {total}; {hint}"
            )
