"""A teacher behind an inference server: its log-probs of sampled tokens and of its own likeliest ones, over HTTP.

    rows -> one request each (vLLM's prompt_logprobs) -> log-probs [B, T], top tokens [N, K]

Legend as in :mod:`kl_comedy.models.logprobs`. The server tempers no log-prob of a prompt, so the policy's temperature
must be 1.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from kl_comedy.config.schema import TeacherConfig
from kl_comedy.errors import RunFailed, bad_value
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import head_weights
from kl_comedy.models.types import ReferencePass
from kl_comedy.rollouts.engines.client import ATTEMPTS, Client, Refused, ServerTrouble

AT_ONCE = 32
"""Requests in flight: the server batches them."""
TIMEOUT_S = 600.0


class TeacherServer:
    """The reference ``teacher`` of a run whose config names an address.

    ``k``: how many of its likeliest tokens the run's terms read; 0 for log-probs of sampled tokens only.
    ``on_all_ranks`` calls what may fail on one process of several. Raises :class:`UserError` where the server does not
    answer, refuses the key, or refuses ``k``.
    """

    moving = False

    def __init__(
        self,
        settings: TeacherConfig,
        policy: LoadedModel,
        k: int,
        on_all_ranks: Callable[[Callable[[], Any]], Any] = lambda action: action(),
    ) -> None:
        assert settings.url is not None
        self._on_all_ranks = on_all_ranks
        self._k, self._vocabulary = k, int(head_weights(policy.model)[0].shape[0])
        key = os.environ.get(settings.api_key_env) or None
        self._client = Client(settings.url, key=key, timeout_s=TIMEOUT_S, model=settings.server_model)
        try:
            models = self._client.get("/v1/models")
            self._client.prompt_logps([0, 0], k)
        except Refused as error:
            why = f"it refuses: {error}"
            if error.status == 401:
                why = f"it refuses the API key in the environment variable {settings.api_key_env}"
            elif "/inference/" in str(error):
                flags = f"--enable-scale-out --max-logprobs {max(k, 1)}"
                why = f"{error}; start vLLM (0.32 or later) with {flags}"
            raise bad_value("reference.teacher.url", settings.url, "a server of the teacher", why) from error
        except ServerTrouble as error:
            why = str(error)
            raise bad_value("reference.teacher.url", settings.url, "a server of the teacher", why) from error
        name = [{field: each.get(field) for field in ("id", "root")} for each in models["data"]]
        self.hash = hashlib.sha256(json.dumps([name, settings.server_model]).encode()).hexdigest()
        """Identity of the server's models by their names: its weights are not seen."""

    @torch.no_grad()
    def forward_pass(
        self, *, prompt_ids_BP: Tensor, prompt_mask_BP: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> ReferencePass:
        """As :meth:`Reference.forward_pass`, with top tokens. Raises :class:`RunFailed` where the server fails."""
        mask_BT = mask_BT.bool()
        prompts = [ids[mask].tolist() for ids, mask in zip(prompt_ids_BP, prompt_mask_BP.bool(), strict=True)]
        rows = [ids[mask].tolist() for ids, mask in zip(ids_BT, mask_BT, strict=True)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = self._on_all_ranks(lambda: list(pool.map(self._ask, prompts, rows)))
        entries = [entry for answer in answers for entry in answer]
        tokens = [token for row in rows for token in row]
        likeliest = [sorted(entry, key=lambda token: (-entry[token], token))[: self._k] for entry in entries]
        if self._k and max(max(top) for top in likeliest) >= self._vocabulary:
            raise RunFailed("reference.teacher.url: a likely token of the teacher is none of the policy's")
        logp_N = torch.tensor([entry[token] for entry, token in zip(entries, tokens, strict=True)])
        top_NK = [[entry[token] for token in top] for entry, top in zip(entries, likeliest, strict=True)]
        device = ids_BT.device
        logp_BT = torch.zeros(ids_BT.shape, device=device).masked_scatter(mask_BT, logp_N.to(device))
        top = (torch.tensor(likeliest, device=device), torch.tensor(top_NK, device=device)) if self._k else None
        return ReferencePass(logp_BT=logp_BT, temperature=1.0, top=top)

    def _ask(self, prompt: Sequence[int], row: Sequence[int]) -> list[dict[int, float]]:
        """Of each token of a completion, its log-prob and those of the likeliest tokens in its place."""
        trouble = ""
        for _ in range(ATTEMPTS):
            try:
                entries = self._client.prompt_logps([*prompt, *row], self._k)[len(prompt) - 1 :]
            except ServerTrouble as error:
                trouble = str(error)
                continue
            except Refused as error:
                raise RunFailed(f"reference.teacher.url: {error}") from error
            if all(len(entry) >= min(self._k, self._vocabulary) for entry in entries):
                return entries
            trouble = f"it gave fewer than {self._k} tokens"
        raise RunFailed(f"reference.teacher.url: {self._client.url}: {trouble}")
