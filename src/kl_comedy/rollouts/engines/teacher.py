"""A teacher on an inference server: its log-probs of sampled tokens and of its own likeliest tokens, over HTTP.

    rows -> one request each (vLLM's prompt_logprobs) -> log-probs [B, T], top tokens [N, K]

Shape legend as in :mod:`kl_comedy.models.logprobs`. A server gives log-probs of a prompt at temperature 1, so that the
policy's temperature must be 1.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from kl_comedy.config.schema import TeacherConfig
from kl_comedy.errors import RunFailed, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import head_weights
from kl_comedy.models.types import ReferencePass
from kl_comedy.records import ModelRows
from kl_comedy.rollouts.engines.client import ATTEMPTS, Client, Refused, ServerTrouble

AT_ONCE = 32
"""Requests in progress; the server makes batches of them."""
TIMEOUT_S = 600.0
"""Seconds without an answer to one request."""


class TeacherServer:
    """The reference ``teacher`` of a run whose config names an address.

    ``k``: how many of its likeliest tokens the run's terms read; 0 for log-probs of sampled tokens only.
    ``on_all_ranks`` calls its argument, which may fail on one rank, and then raises on all ranks. Raises
    :class:`UserError` where the server does not answer, refuses the key, or refuses ``k``.
    """

    moving = False
    """Unlike a reference that follows the policy, it never changes."""

    def __init__(
        self,
        settings: TeacherConfig,
        policy: LoadedModel,
        k: int,
        on_all_ranks: Callable[[Callable[[], Any]], Any] = lambda action: action(),
    ) -> None:
        assert settings.url is not None
        self._on_all_ranks = on_all_ranks
        self._k = k
        weight_VH, _ = head_weights(policy.model)
        self._vocabulary = int(weight_VH.shape[0])
        key = os.environ.get(settings.api_key_env) or None
        self._client = Client(settings.url, key=key, timeout_s=TIMEOUT_S, model=settings.server_model)
        try:
            models = self._client.get("/v1/models")
            # A request like those of the run, so that a server that refuses them is found before anything is trained.
            self._client.prompt_logps([0, 0], k)
        except Refused as error:
            reason = f"it refuses: {error}"
            if error.status == 401:
                reason = f"it refuses the API key in the environment variable {settings.api_key_env}"
            elif "/inference/" in str(error):
                flags = f"--enable-scale-out --max-logprobs {max(k, 1)}"
                reason = f"{error}; start vLLM (0.32 or later) with {flags}"
            raise bad_value("reference.teacher.url", settings.url, "a server of the teacher", reason) from error
        except ServerTrouble as error:
            reason = str(error)
            raise bad_value("reference.teacher.url", settings.url, "a server of the teacher", reason) from error
        # Runs are told apart by this hash, and stored ones have it: the JSON must keep its bytes.
        names = [{"id": model.get("id"), "root": model.get("root")} for model in models["data"]]
        self.hash = hashlib.sha256(json.dumps([names, settings.server_model]).encode()).hexdigest()
        """Identity of the server's models, by their names only: their weights cannot be read."""

    @torch.no_grad()
    def forward_pass(
        self,
        *,
        prompt_ids_BP: Tensor,
        prompt_mask_BP: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        real_BT: Tensor | None = None,
        rows: ModelRows | None = None,
    ) -> ReferencePass:
        """As :meth:`Reference.forward_pass`, with top tokens. Raises :class:`RunFailed` where the server fails."""
        mask_BT = mask_BT.bool()
        if rows is None:
            rows = ModelRows(
                prompt_ids_RP=prompt_ids_BP,
                prompt_mask_RP=prompt_mask_BP,
                ids_RT=ids_BT,
                real_RT=mask_BT if real_BT is None else real_BT,
                mask_RT=mask_BT,
            )
        real_RT = rows.real_RT.bool()
        prompts = [ids[mask].tolist() for ids, mask in zip(rows.prompt_ids_RP, rows.prompt_mask_RP.bool(), strict=True)]
        # The teacher reads what the policy read, an environment's tokens too; only the trained ones are compared.
        completions = [ids[real].tolist() for ids, real in zip(rows.ids_RT, real_RT, strict=True)]
        trained = [mask[real].tolist() for mask, real in zip(rows.mask_RT.bool(), real_RT, strict=True)]
        # On all ranks: a rank that raised alone would leave the others waiting in the next collective.
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = self._on_all_ranks(lambda: list(pool.map(self._ask, prompts, completions)))

        logp_N: list[float] = []
        top_ids_NK: list[list[int]] = []
        top_logps_NK: list[list[float]] = []
        for completion, is_trained, positions in zip(completions, trained, answers, strict=True):
            for token, logps in compress(zip(completion, positions, strict=True), is_trained):
                likeliest = _likeliest(logps, self._k)
                logp_N.append(logps[token])
                top_ids_NK.append(likeliest)
                top_logps_NK.append([logps[id] for id in likeliest])

        device = ids_BT.device
        logp_BT = torch.zeros(ids_BT.shape, device=device)
        logp_BT = logp_BT.masked_scatter(mask_BT, torch.tensor(logp_N).to(device))
        top = None
        if self._k:
            # The policy has no log-prob of a token beyond its own vocabulary.
            if max(max(ids) for ids in top_ids_NK) >= self._vocabulary:
                raise RunFailed("reference.teacher.url: a likely token of the teacher is none of the policy's")
            top = (torch.tensor(top_ids_NK, device=device), torch.tensor(top_logps_NK, device=device))
        return ReferencePass(logp_BT=logp_BT, temperature=1.0, top=top)

    def _ask(self, prompt: Sequence[int], row: Sequence[int]) -> list[dict[int, float]]:
        """The log-probs at each token of a completion, by token id: of the token, and of the likeliest tokens."""
        trouble = ""
        for _ in range(ATTEMPTS):
            try:
                positions = self._client.prompt_logps([*prompt, *row], self._k)
            except ServerTrouble as error:
                trouble = str(error)
                continue
            except Refused as error:
                raise RunFailed(f"reference.teacher.url: {error}") from error
            # The first token of the prompt has no position of its own.
            completion_positions = positions[len(prompt) - 1 :]
            # A vocabulary may have fewer tokens than k.
            needed = min(self._k, self._vocabulary)
            if all(len(logps) >= needed for logps in completion_positions):
                return completion_positions
            trouble = f"it gave fewer than {self._k} tokens"
        raise RunFailed(f"reference.teacher.url: {self._client.url}: {trouble}")


def _likeliest(logps: Mapping[int, float], k: int) -> list[int]:
    """The ``k`` likeliest tokens; the smaller id first where two are equal, so that the order is always the same."""
    return sorted(logps, key=lambda token: (-logps[token], token))[:k]
