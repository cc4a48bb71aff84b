"""For any transformers Trainer (TRL's too): does the engine sample from the current policy?

trainer.add_callback(SamplerVersionProbe(vllm_logps(trainer.vllm_generation.llm), token_ids, tolerance=0.02))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from kl_comedy.errors import RunFailed

EngineLogps = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""From token ids to the engine's log-probs (nats) of all tokens but the first of each row."""

TRL_METRIC = "sampling/sampling_logp_difference/mean"


class SamplerVersionProbe(TrainerCallback):
    """After each update, find the newest version of the policy that the engine's log-probs fit.

    A version is a number of updates. The engine takes weights before it samples, so after an update it has those
    before it: ``max_lag`` 1 (more where one batch is used for several updates). An engine that fits none of the last
    ``keep`` versions within ``tolerance`` (mean absolute difference in nats), or an older one, raises
    :class:`RunFailed`. Versions closer together than the tolerance cannot be told apart, so set it just above the
    engine's own difference (1e-5 in float32, about 1e-2 in bfloat16). ``records``: ``version``, ``difference`` and
    ``moved``, the difference between the policy's last two versions.

    Without ``engine`` (one that sleeps between batches, TRL #5312) the mean difference of the sampled tokens that TRL
    logs for vLLM is compared with the tolerance.
    """

    def __init__(
        self,
        engine: EngineLogps | None = None,
        token_ids: Sequence[Sequence[int]] = (),
        *,
        tolerance: float,
        every: int = 1,
        max_lag: int = 1,
        keep: int = 8,
    ) -> None:
        self.engine = engine
        self.token_ids = [list(ids) for ids in token_ids]
        self.tolerance = tolerance
        self.every = every
        self.max_lag = max_lag
        self.keep = keep
        self.records: list[dict[str, float]] = []
        self._versions: dict[int, Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Record the policy before the first update."""
        if self.engine is not None:
            self._versions = {state.global_step: policy_logps(model, self.token_ids)}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Record the new version; ask the engine."""
        step = state.global_step
        if self.engine is None:
            return
        # Log-probs of a few tokens stand for a version: copies of the weights would not fit.
        self._versions[step] = policy_logps(model, self.token_ids)
        self._versions = dict(sorted(self._versions.items())[-self.keep :])
        # Every version is recorded all the same: an old one may be what the engine still has.
        if step % self.every != 0:
            return
        engine_logps: list[float] = []
        for row in self.engine(self.token_ids):
            engine_logps.extend(row)
        engine = torch.tensor(engine_logps)
        # The mean, because single log-probs of a right engine may differ by more than the tolerance.
        distances = {version: float((engine - logps).abs().mean()) for version, logps in self._versions.items()}
        fitting = [version for version, distance in distances.items() if distance <= self.tolerance]
        # The newest that fits: a policy that has not moved fits several, and an old one is then no fault.
        if fitting:
            version = max(fitting)
            description = f"version {version}"
        else:
            version = min(distances, key=lambda candidate: distances[candidate])
            description = "no kept version"
        *_earlier, previous, latest = self._versions.values()
        moved = float((latest - previous).abs().mean())
        self.records.append({"step": step, "version": version, "difference": distances[version], "moved": moved})
        is_stale = version < step - self.max_lag
        if not fitting or is_stale:
            raise RunFailed(
                f"after update {step} the engine's log-probs fit {description} (nearest: {version}, "
                f"{distances[version]:.2g} nats away; tolerance {self.tolerance:g}); it should have version "
                f"{step - self.max_lag} or later"
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Compare the difference that TRL measured."""
        if self.engine is not None or not logs:
            return
        gap = logs.get(TRL_METRIC)
        if gap is not None and gap > self.tolerance:
            raise RunFailed(
                f"update {state.global_step}: the engine's log-probs of the sampled tokens are {gap:.3g} nats from the "
                f"policy's (tolerance {self.tolerance:g}): it did not sample this policy"
            )


@torch.no_grad()
def policy_logps(model: Any, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """Log-probs (nats, float32, on the CPU) of all tokens but the first of each row, one after the other."""
    device = next(model.parameters()).device
    # Without dropout, as the engine computes them.
    was_training = model.training
    model.eval()
    rows = []
    for ids in token_ids:
        tokens = torch.tensor([ids], device=device)
        logps = torch.log_softmax(model(input_ids=tokens).logits[0, :-1].float(), -1)
        rows.append(logps.gather(-1, tokens[0, 1:, None])[:, 0].cpu())
    model.train(was_training)
    return torch.cat(rows)


def vllm_logps(llm: Any) -> EngineLogps:
    """A function that gives the log-probs that a ``vllm.LLM`` has for given tokens: per sequence, of all but the first.

    ``llm`` may be ``trainer.vllm_generation.llm`` of TRL with ``vllm_mode="colocate"``. The log-probs are at
    temperature 1, whatever a request samples with.
    """

    def engine(token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        # 0: of the prompt's own tokens, without further likely ones; None would be no log-probs. A request must draw at
        # least one token, which is not used.
        settings = SamplingParams(max_tokens=1, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": list(ids)} for ids in token_ids]
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        rows = []
        for ids, output in zip(token_ids, outputs, strict=True):
            # vLLM has None for the first token, which nothing comes before.
            positions = output.prompt_logprobs[1:]
            rows.append([position[token].logprob for token, position in zip(ids[1:], positions, strict=True)])
        return rows

    return engine
