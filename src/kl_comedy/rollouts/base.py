"""What a sampler is, and when it draws from the policy that the learner differentiates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import Prompt, Rollout

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn: divide logits by ``temperature``, then keep ``top_k``, ``top_p``, ``min_p``.

    Temperature 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``stop`` strings end a
    completion after the token that completes one of them.
    """

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

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
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise bad_value("stop", self.stop, "a list of non-empty strings")


def sampling_from(config: RolloutConfig) -> Sampling:
    """The sampling that ``config`` describes. Raises :class:`UserError` for a value out of range."""
    values = {field.name: getattr(config, field.name) for field in fields(Sampling)}
    try:
        return Sampling(**{**values, "stop": tuple(config.stop)})
    except UserError as error:
        raise UserError(f"rollout.{error}") from None


def check_training_sampling(config: RolloutConfig) -> None:
    """Raise :class:`UserError` when training would differentiate another policy than the one that samples."""
    sampling, mismatches = sampling_from(config), []
    if sampling.temperature == 0:
        mismatches.append(
            "temperature: got 0.0; training needs a value above 0 (a greedy sampler has no score to weight)"
        )
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(sampling, name) != off:
            mismatches.append(
                f"{name}: got {getattr(sampling, name)}; training needs {off} (the sampler would draw from a truncated "
                "distribution, while the learner differentiates the full one)"
            )
    if mismatches:
        raise UserError("\n".join(f"rollout.{line}" for line in mismatches))


class RolloutBackend(Protocol):
    """A sampler. Built by a registered ``(config: RolloutConfig, *, loaded: LoadedModel) -> RolloutBackend``.

    What else it can do is declared where it registers: ``capabilities=Capabilities(...)``. ``update_weights`` and
    ``generate`` must not overlap unless the backend declares ``updates_between_tokens`` and runs beside the
    trainer; ``versions`` then says for every token which weights drew it.
    """

    version: int
    """Version of the weights it samples from; stamped on every token."""

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """``group_size`` completions of every prompt, in the order prompts x group.

        ``group_id`` is the index of the prompt in this call. ``logps`` are of the distribution that was
        sampled from: at the sampling temperature, after truncation where there is any; for greedy, of the
        untempered model. The result depends on weights, prompts, settings and ``seed``, not on the global
        random state, which is left alone.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Sample from the learner's current weights from now on, and call them ``version``."""
        ...

    def close(self) -> None:
        """Free memory and processes; the backend is not used afterwards."""
        ...
