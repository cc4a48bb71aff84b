"""The contract of samplers, and when one draws from the policy that the learner differentiates.

RolloutBackend     every sampler
PartBackend        draws a part of a batch on each rank        Capabilities(draws_parts=True)
FolderBackend      writes logs or weights in the run folder    Capabilities(needs_folder=True)
EngineBackend      engines beside the trainer                  Capabilities(in_trainer_ranks=False)
RecordedBackend    reads its training batches                  Capabilities(recorded=True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import Prompt, Rollout, Scored

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn: logits are divided by ``temperature``, then ``top_k``, ``top_p``, ``min_p`` truncate.

    Temperature 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. A completion ends after the token that
    completes one of the ``stop`` strings. ``top_logps``: of how many of its likeliest tokens each rollout has the
    log-probs, at each token. ``records_kept``: whether each rollout has the sets of tokens that the truncation kept.
    Raises :class:`UserError` for a value out of range.
    """

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    top_logps: int = 0
    records_kept: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise bad_value("temperature", self.temperature, "0 (greedy) or more")
        if self.max_new_tokens < 1:
            raise bad_value("max_new_tokens", self.max_new_tokens, "1 or more")
        if not 0 < self.top_p <= 1:
            raise bad_value("top_p", self.top_p, "above 0, up to 1 (1 is off)")
        if self.top_k < 0:
            raise bad_value("top_k", self.top_k, "0 (off) or more")
        if not 0 <= self.min_p < 1:
            raise bad_value("min_p", self.min_p, "0 (off) up to, but not including, 1")
        # The empty text would end every completion after its first token.
        has_empty_text = any(not text for text in self.stop)
        if isinstance(self.stop, str) or has_empty_text:
            raise bad_value("stop", self.stop, "a list of non-empty strings")


def sampling_from(config: RolloutConfig, *, top_logps: int = 0) -> Sampling:
    """How training samples. What ``rollout.truncation`` keeps is recorded, because the learner renormalizes over it.

    ``top_logps``: as in :class:`Sampling`. Raises :class:`UserError` for a value out of range.
    """
    truncation = config.truncation
    try:
        return Sampling(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            top_p=truncation.top_p,
            top_k=truncation.top_k,
            min_p=truncation.min_p,
            records_kept=truncation.is_on,
            stop=tuple(config.stop),
            top_logps=top_logps,
        )
    except UserError as error:
        raise UserError(f"rollout.{error}") from None


class RolloutBackend(Protocol):
    """What every sampler has. A registered builder ``(config: RolloutConfig, *, loaded: LoadedModel)`` returns one.

    Each rank builds it once, after the policy is loaded, and calls its methods from one thread. What else a backend
    can do, it declares where it registers (``capabilities=Capabilities(...)``); the protocols below say which methods
    a declaration promises. A builder raises :class:`UserError` for an option that it does not take.
    """

    version: int
    """Version of the weights it samples from: the number of optimizer updates. Stamped on every token."""

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """``len(prompts) * group_size`` completions: all of the first prompt, then all of the second, and so on.

        Called for each batch of training and each evaluation set. ``group_id`` is the index of the prompt in this
        call. A rollout of T tokens has T ``logps`` and T ``versions``; the end token counts. ``logps`` (nats) are of
        the distribution that was sampled from: at the sampling temperature, after truncation where there is any; for
        greedy sampling, of the untempered model. The result depends on weights, prompts, settings and ``seed``, not
        on the global random state, which is left alone.

        Raises :class:`UserError` for a request that cannot be met, as a prompt longer than the model's context, and
        :class:`RunFailed` where the sampler fails or a log-prob is not finite.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Sample from the learner's current weights from now on, and call them ``version``.

        Called after each optimizer update, and once after a checkpoint is restored. Never overlaps with
        :meth:`generate`. Raises :class:`RunFailed` where the sampler does not have the trainer's weights afterwards.
        """
        ...

    def close(self) -> None:
        """Free memory and processes. Called once, also after an error; the backend is not used afterwards."""
        ...


class PartBackend(RolloutBackend, Protocol):
    """``draws_parts``: several ranks share a batch, and each draws the completions of its own prompts."""

    def generate_part(
        self, prompts: Sequence[Prompt], part: tuple[int, int], *, group_size: int, sampling: Sampling, seed: int
    ) -> list[Rollout]:
        """What :meth:`generate` returns for ``prompts[part[0]:part[1]]``: equal tokens, log-probs and group ids.

        Every rank calls it with the same arguments but for ``part``, so that completions do not depend on the number
        of ranks. Raises as :meth:`generate` does.
        """
        ...


class FolderBackend(RolloutBackend, Protocol):
    """``needs_folder``: the backend writes logs or weights."""

    def work_in(self, folder: Path) -> None:
        """Write under ``folder`` (the run's) from now on. Called once, before the first weights are published.

        An evaluation without a run does not call it: the backend then uses a temporary folder. Raises OSError.
        """
        ...


class EngineBackend(RolloutBackend, Protocol):
    """``in_trainer_ranks=False``: engines beside the trainer. Every rank builds it, with ``leader`` true on rank 0.

    Rank 0 talks to the engines; the other ranks take part in :meth:`publish` only, because the weights of a sharded
    policy are gathered from all of them. With ``updates_between_tokens``, :meth:`publish` and :meth:`load` may run in
    one thread each while :meth:`generate` runs in another, and ``versions`` says for each token which weights drew it.
    """

    restarts: int
    """How often an engine was restarted so far."""

    def publish(self, version: int) -> None:
        """Stage the learner's weights as ``version`` and start engines that do not run. Does not wait for engines.

        All ranks call it, in step, after each update. Raises :class:`RunFailed` where the weights cannot be staged.
        """
        ...

    def load(self) -> int:
        """Let every engine take the newest staged weights; returns their version. Rank 0 calls it, from any thread.

        Raises :class:`RunFailed` where no engine is left, or one has other weights than the trainer afterwards.
        """
        ...

    def cpu_seconds(self) -> float:
        """CPU seconds of the engines that this run started, since their start. Read by rank 0 for its metrics."""
        ...


class RecordedBackend(RolloutBackend, Protocol):
    """``recorded``: training batches are read, not sampled. Rank 0 reads; ``generate`` serves evaluation only."""

    judges_again: bool
    """Whether the run scores the recorded texts itself, instead of using the recorded rewards."""

    def bind(self, prompts: Sequence[Prompt], *, weights: Mapping[str, float], updates: int, per_batch: int) -> None:
        """Check the recording against the run before training. Called once, on rank 0.

        ``weights``: of the run's rewards, by label. The run makes ``updates`` updates, ``per_batch`` from each batch.
        Raises :class:`UserError` for the first thing that does not fit.
        """
        ...

    def batch(self, number: int) -> list[Scored]:
        """The rows of the run's batch ``number``, counted from 0. Raises :class:`RunFailed` if the file changed."""
        ...
