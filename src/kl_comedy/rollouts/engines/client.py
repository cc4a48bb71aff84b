"""The client of one inference server over HTTP: its identity, completions of token ids, and its weights.

The routes are vLLM's; :mod:`kl_comedy.rollouts.engines.hf_server` has the same ones. There are two errors:
:class:`ServerTrouble`, where another request or another server may succeed, and :class:`Refused`, where none will.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import LoadedModel
from kl_comedy.models.sources import first_line
from kl_comedy.records import Prompt, Rollout
from kl_comedy.rollouts.base import Sampling
from kl_comedy.rollouts.decoding import Completion, StopStrings, ending
from kl_comedy.rollouts.engines.options import KEY_VARIABLE
from kl_comedy.rollouts.engines.transports import Transport
from kl_comedy.rollouts.engines.weights import Probe, StagedWeights
from kl_comedy.rollouts.hf import Converter, end_tokens

LABEL = "kl_comedy/"
"""Prefix of the version label of weights that a run sent; the run's random id and the version follow."""
NOT_A_VERSION = -1
"""In a label: weights of a run that are not one of its versions, as between two versions during a transfer."""
GENERATE = "/inference/v1/generate"
ANOTHER_RUN = 409
"""Status of :class:`Refused` where another run sent the server its weights."""
CONNECT_TIMEOUT_S = 10.0
ATTEMPTS = 3
"""How often a request is sent before :class:`ServerTrouble` counts as a failure, where no server is restarted."""
MIN_KEY_CHARACTERS = 16
"""Length of the key of a server that replaces its weights for whoever has the key. Keys made by a run have 43."""
SEED_BITS = 62
"""vLLM adds the index of a completion in its group to the seed and stores the sum in a signed 64-bit integer."""


class ServerTrouble(Exception):
    """No answer, a broken answer, none in time, or an internal error."""


class Refused(Exception):
    """The server answered that it will not do what was asked. ``status`` is the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_key(key: str) -> str:
    """Return ``key``. Raises :class:`UserError`, which does not show it, where it is too short."""
    # Length stands for strength: a run cannot know how a key was made.
    if len(key) >= MIN_KEY_CHARACTERS:
        return key
    given = f"one of {len(key)}" if key else "none"
    reason = "whoever guesses it replaces the weights"
    raise UserError(
        f"{KEY_VARIABLE} must hold a key of at least {MIN_KEY_CHARACTERS} characters ({reason}); got {given}"
    )


def prompt_seed(seed: int, position: int) -> int:
    """The seed of one prompt's group, from the seed of the call and the position of the prompt in it.

    Stored results depend on it. A hash, because vLLM adds small numbers to seeds: neighbours would share completions.

    >>> prompt_seed(1, 0) == prompt_seed(1, 0), prompt_seed(1, 0) == prompt_seed(1, 1)
    (True, False)
    """
    digest = hashlib.sha256(f"{seed}/{position}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def sampling_fields(sampling: Sampling, *, ends: Sequence[int], n: int, seed: int) -> dict[str, Any]:
    """The fields of vLLM's ``SamplingParams`` for a group of ``n``.

    Greedy sampling asks for one completion, because the rest of the group would be copies of it.
    """
    greedy = sampling.temperature == 0
    fields: dict[str, Any] = {
        "n": 1 if greedy else n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
        "logprobs": 0,  # of the sampled token alone
        # The policy's end tokens, and not those that vLLM reads from a checkpoint: these may be others.
        "stop_token_ids": list(ends),
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
    }
    if sampling.records_kept:
        # Only where it is asked for: vLLM has no such field.
        fields["records_kept"] = True
    if sampling.stop:
        # The stop string is part of the completion, as with the hf backend, and may consist of special tokens.
        fields |= {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return fields


def _httpx() -> Any:
    """The HTTP client that huggingface_hub needs: httpx2, in older versions httpx."""
    # Imported when it is used: a run without engines needs neither.
    with contextlib.suppress(ImportError):
        return importlib.import_module("httpx2")
    return importlib.import_module("httpx")


class Client:
    """The routes that a run uses. Thread-safe. The key is sent with every request and shown nowhere.

    ``run``: the id of this run in labels of weights. ``model``: which of the server's models draws; None: its base.
    """

    def __init__(
        self, url: str, *, key: str | None, timeout_s: float, run: str = "-", model: str | None = None
    ) -> None:
        httpx = _httpx()
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.host = urlsplit(url).hostname or ""
        self._label = f"{LABEL}{run}/"
        self._model: dict[str, str] = {}
        if model is not None:
            self._model = {"model": model}
        headers = {}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            # No connection is used twice: vLLM closes one on which it answered 500, and the next request on it would
            # be lost.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            # A proxy of the environment would get the key and the weights, and may not know the cluster's nodes.
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def ready(self) -> bool:
        """Whether the server's health check succeeds."""
        httpx = _httpx()
        try:
            return bool(self._http.get("/health", timeout=CONNECT_TIMEOUT_S).is_success)
        # RuntimeError: another thread closed the client meanwhile.
        except (httpx.HTTPError, RuntimeError):
            return False

    def identify(self) -> tuple[bool, int | None]:
        """Whether some run sent the server its weights, and its context in tokens (None: not known).

        Raises :class:`Refused` where a route is missing (404) or the key is wrong (401).
        """
        # A route that vLLM protects by its key: a wrong key shows now, and not at the first batch.
        models = self.get("/v1/models")
        version = self.get("/version")
        try:
            context = models["data"][0].get("max_model_len")
            version["version"]  # Its value does not matter: only vLLM, and our own server, have it.
        except (KeyError, IndexError, TypeError) as error:
            raise Refused(404, "it answers, but not as vLLM does") from error
        label = str(self.get("/weight_info").get("weight_version"))
        has_weights_of_a_run = label.startswith(LABEL)
        if context is None:
            return has_weights_of_a_run, None
        return has_weights_of_a_run, int(context)

    def generate(self, requests: Sequence[Mapping[str, Any]]) -> list[list[Completion]]:
        """The completions of each request (``token_ids``, ``sampling_params``), in order.

        Several requests at once are for our own server; vLLM's route takes one. Raises :class:`ServerTrouble` and
        :class:`Refused`.
        """
        if len(requests) == 1:
            answers = [self.call(GENERATE, **requests[0], **self._model)]
        else:
            answers = self.call(GENERATE, groups=list(requests))["groups"]
        return [_completions(answer, self._label) for answer in answers]

    def prompt_logps(self, ids: Sequence[int], k: int) -> list[dict[int, float]]:
        """Log-probs (nats, at temperature 1) at each position of ``ids`` but the first, by token id.

        At each position there are the token of ``ids`` and the ``k`` likeliest tokens. Raises :class:`ServerTrouble`
        where the answer does not have them.
        """
        fields = {"n": 1, "temperature": 1.0, "max_tokens": 1, "seed": 0, "logprobs": 0, "prompt_logprobs": k}
        fields |= {"ignore_eos": True, "detokenize": False}
        answer = self.call(GENERATE, token_ids=list(ids), sampling_params=fields, **self._model)
        try:
            positions = [_position_logps(position) for position in answer["prompt_logprobs"][1:]]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ServerTrouble("the answer has no log-probs of the prompt's tokens") from error
        tokens = ids[1:]
        has_token = [token in logps for token, logps in zip(tokens, positions, strict=False)]
        if len(has_token) < len(tokens) or not all(has_token):
            raise ServerTrouble("the answer lacks log-probs of the prompt's tokens")
        return positions

    def probe_gap(self, probe: Probe) -> float:
        """How far the server's log-probs are from the trainer's; see :meth:`Probe.gap`."""
        answer = self.call(GENERATE, token_ids=list(probe.ids), sampling_params=probe.sampling_fields(), **self._model)
        prompt_logps = []
        for token, position in zip(probe.ids[1:], answer["prompt_logprobs"][1:], strict=True):
            prompt_logps.append(float(position[str(token)]["logprob"]))
        drawn = [(int(choice["token_ids"][0]), _logps(choice)[0]) for choice in answer["choices"]]
        return probe.gap(prompt_logps, drawn)

    def take_weights(self, weights: StagedWeights, transport: Transport) -> None:
        """Replace the server's weights and label them by their version.

        Requests in progress are paused and continue with the new weights; vLLM computes their prefixes again. Raises
        :class:`ServerTrouble` and :class:`Refused`; the server is then still paused (:meth:`abandon_transfer`).
        """
        # keep: requests in progress stop where they are. The other modes end them, or wait until they have ended.
        self._request("POST", "/pause", params={"mode": "keep"})
        # Before the transfer: one that fails half-way leaves a mixture of two versions.
        self.call("/update_weight_version", new_version=f"{self._label}{NOT_A_VERSION}")
        try:
            transport.send(weights, self)
        except (OSError, RuntimeError) as error:
            raise ServerTrouble(f"the transfer of weights failed: {first_line(error)}") from error
        # The keys and values in it are those of the older weights.
        reset = self._request("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        if reset.get("success") is False:
            raise ServerTrouble("it did not drop its prefix cache")
        self.call("/update_weight_version", new_version=f"{self._label}{weights.version}")
        self.call("/resume")

    def abandon_transfer(self) -> None:
        """After :meth:`take_weights` failed: let the server answer requests again, its weights labelled as no version.

        Raises nothing: the failure before is the one to report.
        """
        self._try_to_call("/update_weight_version", {"new_version": f"{self._label}{NOT_A_VERSION}"})
        self._try_to_call("/resume", {})

    def _try_to_call(self, path: str, body: Mapping[str, Any]) -> None:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(ServerTrouble, Refused):
                self._request("POST", path, json=body, timeout=CONNECT_TIMEOUT_S)
                return

    def call(self, path: str, **body: Any) -> Any:
        """The JSON content of the answer to a POST of ``body`` as JSON. Raises as :meth:`generate`."""
        return self._request("POST", path, json=body)

    def get(self, path: str) -> Any:
        """The JSON content of the answer to a GET. Raises as :meth:`generate`."""
        return self._request("GET", path)

    def _request(self, method: str, path: str, **content: Any) -> Any:
        httpx = _httpx()
        try:
            answer = self._http.request(method, path, **content)
        except httpx.TimeoutException as error:
            raise ServerTrouble(f"no answer to {path} in time ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise ServerTrouble(f"{path}: {type(error).__name__}: {error}") from error
        text = f"{path} answered {answer.status_code}: {answer.text[:300]}"
        # A server error may pass, so the request is sent again; a refusal would only be refused again.
        if answer.status_code >= 500:
            raise ServerTrouble(text)
        if answer.status_code >= 300:
            raise Refused(answer.status_code, text)
        if not answer.content:
            return {}
        try:
            return answer.json()
        except ValueError as error:
            # Another program listens there. It is not trouble that a restart could end.
            raise Refused(404, f"{path} answered something that is not JSON") from error


def _position_logps(position: Mapping[str, Any]) -> dict[int, float]:
    """The log-probs at one position of a prompt, by token id."""
    return {int(token): float(entry["logprob"]) for token, entry in position.items()}


def _completions(answer: Mapping[str, Any], label: str) -> list[Completion]:
    completions = []
    # Their order is not promised, and a rollout's place in its group decides what it is compared with.
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        ids = [int(token) for token in choice["token_ids"]]
        versions = token_versions(choice.get("weight_versions") or (), len(ids), label)
        completions.append(Completion(ids=ids, logps=_logps(choice), versions=versions, kept=_kept_sets(choice)))
    return completions


def _kept_sets(choice: Mapping[str, Any]) -> list[torch.Tensor]:
    """The ids that the truncation kept at each token; empty where the answer has none."""
    kept_sets = choice.get("kept") or []
    # One tensor and its parts: a tensor for each token would take most of the time that an answer takes to read.
    ids_M = torch.tensor(list(itertools.chain.from_iterable(kept_sets)), dtype=torch.int32)
    return list(torch.split(ids_M, [len(ids) for ids in kept_sets]))


def _logps(choice: Mapping[str, Any]) -> list[float]:
    return [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]


def token_versions(spans: Sequence[Mapping[str, Any]], length: int, own_prefix: str) -> list[int]:
    """The version of each of ``length`` tokens, from the server's spans.

    It is -1 for weights that no run sent, as after a restart. The labels of this run begin with ``own_prefix``. Raises
    :class:`Refused` for weights that another run sent, and where the spans do not cover the tokens.

    >>> spans = [{"version": "kl_comedy/a/3", "start": 0, "end": 2}, {"version": "kl_comedy/a/4", "start": 2, "end": 3}]
    >>> token_versions(spans, 3, "kl_comedy/a/")
    [3, 3, 4]
    """
    versions: list[int] = []
    for span in spans:
        label = str(span["version"])
        # The run's random id is in the prefix: version 3 of another run is not our version 3.
        if label.startswith(own_prefix):
            version = int(label.removeprefix(own_prefix))
        elif label.startswith(LABEL):
            reason = "another run updates it; give each run its own servers"
            message = f"tokens were drawn with weights that this run did not send (label {label!r}): {reason}"
            raise Refused(ANOTHER_RUN, message)
        else:
            version = NOT_A_VERSION
        tokens = int(span["end"]) - int(span["start"])
        versions += [version] * tokens
    if len(versions) != length:
        raise Refused(400, f"it names the weight version of {len(versions)} of {length} tokens")
    return versions


class EngineOutput:
    """Makes rollouts of an engine's completions, with the tokenizer and the end tokens of the policy.

    They end where those of the ``hf`` backend would.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer = loaded.tokenizer
        self._convert = Converter(loaded.tokenizer)
        self.ends = end_tokens(loaded.causal, loaded.tokenizer)

    def rollouts(
        self, prompt: Prompt, group: int, rows: Sequence[Completion], *, group_size: int, stop: Sequence[str]
    ) -> list[Rollout]:
        """The group of one prompt. A single greedy completion stands for every member of its group.

        Raises :class:`RunFailed` when a sampled token has no finite log-prob, or completions are missing.
        """
        if len(rows) not in (1, group_size):
            raise RunFailed(f"the engine gave {len(rows)} completions of a prompt where {group_size} were asked")
        # Greedy sampling asked for one completion only; see sampling_fields.
        whole_group = rows if len(rows) == group_size else list(rows) * group_size
        return [self._convert(prompt, group, self._ended(row, stop)) for row in whole_group]

    def _ended(self, row: Completion, stop: Sequence[str]) -> Completion:
        """``row``, cut after the first end token or the token that completes a stop string."""
        ids = row.ids
        stops = StopStrings(self._tokenizer, stop)
        stop_length = 0
        if stops.in_text_of(ids):
            # A text that has a stop string keeps it as it grows, so that the first such length is found by halving.
            stop_length = bisect.bisect_left(range(len(ids)), True, lo=1, key=lambda n: stops.in_text_of(ids[:n]))
        end, reason = ending(ids, self.ends, stop_length)
        return Completion(
            ids=ids[:end],
            logps=row.logps[:end],
            versions=row.versions[:end],
            stop_reason=reason,
            kept=row.kept[:end],
        )
