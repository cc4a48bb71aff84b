"""One inference server over HTTP: who it is, completions of token ids, its weights; and their form on both sides.

The routes are vLLM's; :mod:`kl_comedy.rollouts.engines.hf_server` has the same ones. Two errors:
:class:`ServerTrouble`, where asking again or elsewhere may help, and :class:`Refused`, where it will not.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

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
"""Prefix of the version label of weights that a run of ours sent; the run's own mark and the version follow."""
GENERATE = "/inference/v1/generate"
ANOTHER_RUN = 409
"""Status of :class:`Refused` where another run sent the server its weights."""
CONNECT_TIMEOUT_S = 10.0
ATTEMPTS = 3
MIN_KEY_CHARACTERS = 16
"""Of the key of a server that replaces its weights for whoever has it; the keys that runs make have 43."""
SEED_BITS = 62
"""vLLM adds the number of the sibling to a seed and stores it in a signed 64-bit integer."""


class ServerTrouble(Exception):
    """No answer, a broken answer, none in time, or an internal error."""


class Refused(Exception):
    """The server understood and says no. ``status`` is the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_key(key: str) -> str:
    """``key``. Raises :class:`UserError` where it is too short to be one, without showing it."""
    if len(key) < MIN_KEY_CHARACTERS:
        given = f"one of {len(key)}" if key else "none"
        why = "whoever guesses it replaces the weights"
        raise UserError(
            f"{KEY_VARIABLE} must hold a key of at least {MIN_KEY_CHARACTERS} characters ({why}); got {given}"
        )
    return key


def prompt_seed(seed: int, position: int) -> int:
    """The seed of one prompt's group, from the seed of the call and the place of the prompt in it.

    >>> prompt_seed(1, 0) == prompt_seed(1, 0), prompt_seed(1, 0) == prompt_seed(1, 1)
    (True, False)
    """
    digest = hashlib.sha256(f"{seed}/{position}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def sampling_fields(sampling: Sampling, *, ends: Sequence[int], n: int, seed: int) -> dict[str, Any]:
    """The fields of vLLM's ``SamplingParams``. Greedy asks for one completion: the group would be copies of it."""
    fields: dict[str, Any] = {
        "n": n if sampling.temperature > 0 else 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
        "logprobs": 0,
        "stop_token_ids": list(ends),
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        fields |= {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return fields


def _httpx() -> Any:
    """The HTTP client that huggingface_hub needs: httpx2, in older versions httpx."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("httpx2")
    return importlib.import_module("httpx")


class Client:
    """The routes we use. Thread-safe. The key is sent with every request and shown nowhere.

    ``run``: the mark of this run in labels of weights. ``model``: which of the server's models draws; None: its base.
    """

    def __init__(
        self, url: str, *, key: str | None, timeout_s: float, run: str = "-", model: str | None = None
    ) -> None:
        httpx = _httpx()
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.host = urlsplit(url).hostname or ""
        self._label = f"{LABEL}{run}/"
        self._model = {} if model is None else {"model": model}
        self._http = httpx.Client(
            base_url=self.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            # none is used twice: vLLM closes one on which it answered a 500, and the next request would be lost
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def ready(self) -> bool:
        """Whether the server answers that it is well."""
        httpx = _httpx()
        try:
            return bool(self._http.get("/health", timeout=CONNECT_TIMEOUT_S).is_success)
        except (httpx.HTTPError, RuntimeError):  # RuntimeError: the client was closed meanwhile
            return False

    def identify(self) -> tuple[bool, int | None]:
        """Whether a run of ours sent its weights, and its context in tokens (None: not known).

        Raises :class:`Refused` where a route is missing (404) or the key is wrong (401).
        """
        models, version = self.get("/v1/models"), self.get("/version")
        try:
            context, _ = models["data"][0].get("max_model_len"), version["version"]
        except (KeyError, IndexError, TypeError) as error:
            raise Refused(404, "it answers, but not as vLLM does") from error
        label = str(self.get("/weight_info").get("weight_version"))
        return label.startswith(LABEL), None if context is None else int(context)

    def generate(self, requests: Sequence[Mapping[str, Any]]) -> list[list[Completion]]:
        """The completions of each request (``token_ids``, ``sampling_params``), in order. vLLM takes one at a time."""
        if len(requests) == 1:
            answers = [self.call(GENERATE, **requests[0], **self._model)]
        else:
            answers = self.call(GENERATE, groups=list(requests))["groups"]
        return [_completions(answer, self._label) for answer in answers]

    def prompt_logps(self, ids: Sequence[int], k: int) -> list[dict[int, float]]:
        """Log-probs (nats, at temperature 1) of each token but the first, and of the ``k`` likeliest in its place.

        Raises :class:`ServerTrouble` where the answer does not have them.
        """
        fields = {"n": 1, "temperature": 1.0, "max_tokens": 1, "seed": 0, "logprobs": 0, "prompt_logprobs": k}
        fields |= {"ignore_eos": True, "detokenize": False}
        answer = self.call(GENERATE, token_ids=list(ids), sampling_params=fields, **self._model)
        try:
            entries = [
                {int(token): float(each["logprob"]) for token, each in entry.items()}
                for entry in answer["prompt_logprobs"][1:]
            ]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ServerTrouble("the answer has no log-probs of the prompt's tokens") from error
        if [token for token, entry in zip(ids[1:], entries, strict=False) if token in entry] != list(ids[1:]):
            raise ServerTrouble("the answer lacks log-probs of the prompt's tokens")
        return entries

    def probe_gap(self, probe: Probe) -> float:
        """How far the server's log-probs are from the trainer's; see :meth:`Probe.gap`."""
        answer = self.call(GENERATE, token_ids=list(probe.ids), sampling_params=probe.sampling_fields(), **self._model)
        prompt = zip(probe.ids[1:], answer["prompt_logprobs"][1:], strict=True)
        drawn = [(int(each["token_ids"][0]), _logps(each)[0]) for each in answer["choices"]]
        return probe.gap([float(entry[str(token)]["logprob"]) for token, entry in prompt], drawn)

    def take_weights(self, weights: StagedWeights, transport: Transport) -> None:
        """Replace the server's weights, and name them by their version.

        Requests in progress are paused and continue with the new weights; vLLM computes their prefixes anew.
        """
        self._request("POST", "/pause", params={"mode": "keep"})
        self.call("/update_weight_version", new_version=f"{self._label}-1")  # until all of them are there
        try:
            transport.send(weights, self)
        except (OSError, RuntimeError) as error:
            raise ServerTrouble(f"the transfer of weights failed: {first_line(error)}") from error
        reset = self._request("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        if reset.get("success") is False:
            raise ServerTrouble("it did not drop its prefix cache")
        self.call("/update_weight_version", new_version=f"{self._label}{weights.version}")
        self.call("/resume")

    def abandon_transfer(self) -> None:
        """After :meth:`take_weights` failed: answer requests again, with weights that are no version of this run."""
        for path, body in (("/update_weight_version", {"new_version": f"{self._label}-1"}), ("/resume", {})):
            for _ in range(ATTEMPTS):
                with contextlib.suppress(ServerTrouble, Refused):
                    self._request("POST", path, json=body, timeout=CONNECT_TIMEOUT_S)
                    break

    def call(self, path: str, **body: Any) -> Any:
        """POST ``body`` as JSON; the content of the answer."""
        return self._request("POST", path, json=body)

    def get(self, path: str) -> Any:
        """The content of the answer."""
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
        if answer.status_code >= 500:
            raise ServerTrouble(text)
        if answer.status_code >= 300:
            raise Refused(answer.status_code, text)
        try:
            return answer.json() if answer.content else {}
        except ValueError as error:
            raise Refused(404, f"{path} answered something that is not JSON") from error


def _completions(answer: Mapping[str, Any], label: str) -> list[Completion]:
    completions = []
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        ids = [int(token) for token in choice["token_ids"]]
        versions = token_versions(choice.get("weight_versions") or (), len(ids), label)
        completions.append(Completion(ids=ids, logps=_logps(choice), versions=versions))
    return completions


def _logps(choice: Mapping[str, Any]) -> list[float]:
    return [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]


def token_versions(spans: Sequence[Mapping[str, Any]], length: int, ours: str) -> list[int]:
    """The version of each token, from the server's spans; -1 for weights of its own, as after a restart.

    ``ours`` begins the labels of this run. Raises :class:`Refused` for weights that another run sent.

    >>> spans = [{"version": "kl_comedy/a/3", "start": 0, "end": 2}, {"version": "kl_comedy/a/4", "start": 2, "end": 3}]
    >>> token_versions(spans, 3, "kl_comedy/a/")
    [3, 3, 4]
    """
    versions: list[int] = []
    for span in spans:
        label = str(span["version"])
        if label.startswith(LABEL) and not label.startswith(ours):
            why = "another run updates it; give each run its own servers"
            raise Refused(
                ANOTHER_RUN, f"tokens were drawn with weights that this run did not send (label {label!r}): {why}"
            )
        version = int(label.removeprefix(ours)) if label.startswith(ours) else -1
        versions += [version] * (int(span["end"]) - int(span["start"]))
    if len(versions) != length:
        raise Refused(400, f"it names the weight version of {len(versions)} of {length} tokens")
    return versions


class EngineOutput:
    """What an engine drew to rollouts as the ``hf`` backend means them, by tokenizer and end tokens of the policy."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer, self._convert = loaded.tokenizer, Converter(loaded.tokenizer)
        self.ends = end_tokens(loaded.causal, loaded.tokenizer)

    def rollouts(
        self, prompt: Prompt, group: int, rows: Sequence[Completion], *, group_size: int, stop: Sequence[str]
    ) -> list[Rollout]:
        """The group of one prompt. A single greedy completion stands for every member of its group.

        Raises :class:`RunFailed` when a sampled token has no finite log-prob, or completions are missing.
        """
        if len(rows) not in (1, group_size):
            raise RunFailed(f"the engine gave {len(rows)} completions of a prompt where {group_size} were asked")
        whole_group = rows if len(rows) == group_size else list(rows) * group_size
        return [self._convert(prompt, group, self._ended(row, stop)) for row in whole_group]

    def _ended(self, row: Completion, stop: Sequence[str]) -> Completion:
        """Cut after the first end token or the token that completes a stop string."""
        ids, stops = row.ids, StopStrings(self._tokenizer, stop)
        stop_length = 0
        if stops.in_text_of(ids):
            stop_length = bisect.bisect_left(range(len(ids)), True, lo=1, key=lambda n: stops.in_text_of(ids[:n]))
        end, reason = ending(ids, self.ends, stop_length)
        return Completion(ids=ids[:end], logps=row.logps[:end], versions=row.versions[:end], stop_reason=reason)
