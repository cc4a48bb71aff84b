"""One vLLM server over HTTP: who it is, completions of token ids, weights from a folder.

Two errors: :class:`ServerTrouble`, where asking again or elsewhere may help, and :class:`Refused`, where it will not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.rollouts.vllm.convert import Completion
from kl_comedy.rollouts.vllm.probe import Probe, ProbeAnswer

LABEL = "kl_comedy/"
"""Prefix of the version label of weights that a run of ours sent."""
CONNECT_TIMEOUT_S = 10.0


class ServerTrouble(Exception):
    """No answer, a broken answer, none in time, or an internal error."""


class Refused(Exception):
    """The server understood and says no. ``status`` is the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a server says about itself. ``label``: of its weights; ``context``: its longest sequence, in tokens."""

    vllm: str
    model: str
    context: int | None
    label: str


class Client:
    """The routes we use. Thread-safe. The key is sent with every request and shown nowhere."""

    def __init__(self, url: str, *, key: str | None, timeout_s: float) -> None:
        import httpx2 as httpx

        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def ready(self) -> bool:
        """Whether the server answers that it is well."""
        import httpx2 as httpx

        try:
            return bool(self._http.get("/health", timeout=CONNECT_TIMEOUT_S).is_success)
        except httpx.HTTPError:
            return False

    def identify(self) -> Identity:
        """Raises :class:`Refused` where a route is missing (404) or the key is wrong (401)."""
        models = self._call("GET", "/v1/models")
        version = self._call("GET", "/version")
        try:
            served = models["data"][0]
            model, vllm = str(served["id"]), str(version["version"])
        except (KeyError, IndexError, TypeError) as error:
            raise Refused(404, "it answers, but not as vLLM does") from error
        label = str(self._call("GET", "/weight_info").get("weight_version"))
        context = served.get("max_model_len")
        return Identity(model=model, vllm=vllm, label=label, context=None if context is None else int(context))

    def generate(self, token_ids: Sequence[int], fields: Mapping[str, Any]) -> list[Completion]:
        """Completions of one prompt, in order. ``fields`` are of vLLM's ``SamplingParams``."""
        choices = self._generate(token_ids, fields)["choices"]
        completions = []
        for choice in sorted(choices, key=lambda choice: choice["index"]):
            ids, logps = _tokens(choice)
            versions = token_versions(choice.get("weight_versions") or (), len(ids))
            completions.append(Completion(token_ids=ids, logps=logps, versions=versions))
        return completions

    def answer(self, probe: Probe) -> ProbeAnswer:
        """The server's answer to the probe."""
        answer = self._generate(probe.ids, probe.sampling_fields())
        prompt = zip(probe.ids[1:], answer["prompt_logprobs"][1:], strict=True)
        drawn = [_tokens(choice) for choice in answer["choices"]]
        return ProbeAnswer(
            fixed=tuple(float(entry[str(token)]["logprob"]) for token, entry in prompt),
            sampled_ids=tuple(ids[0] for ids, _ in drawn),
            sampled=tuple(logps[0] for _, logps in drawn),
        )

    def take_weights(self, folder: Path, version: int) -> None:
        """Replace the server's weights by those of the checkpoint ``folder`` and call them ``version``.

        Requests in progress are paused and continue with the new weights, their prefixes computed anew.
        """
        self._call("POST", "/pause", params={"mode": "keep"})
        self._call(
            "POST", "/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        )
        reset = self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        if reset.get("success") is False:
            raise ServerTrouble("it kept its prefix cache")
        self._call("POST", "/update_weight_version", json={"new_version": f"{LABEL}{version}"})
        self._call("POST", "/resume")

    def _generate(self, token_ids: Sequence[int], fields: Mapping[str, Any]) -> Any:
        body = {"token_ids": list(token_ids), "sampling_params": dict(fields)}
        return self._call("POST", "/inference/v1/generate", json=body)

    def _call(self, method: str, path: str, **content: Any) -> Any:
        import httpx2 as httpx

        try:
            answer = self._http.request(method, path, **content)
        except httpx.TimeoutException as error:
            raise ServerTrouble(f"no answer to {path} in time ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise ServerTrouble(f"{path}: {type(error).__name__}: {error}") from error
        if answer.status_code >= 500:
            raise ServerTrouble(f"{path} answered {answer.status_code}: {answer.text[:300]}")
        if answer.status_code >= 300:
            raise Refused(answer.status_code, f"{path} answered {answer.status_code}: {answer.text[:300]}")
        if not answer.content:
            return {}
        try:
            return answer.json()
        except ValueError as error:
            raise Refused(404, f"{path} answered something that is not JSON") from error


def _tokens(choice: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and log-probs (nats) of a choice."""
    content = choice["logprobs"]["content"]
    return tuple(int(token) for token in choice["token_ids"]), tuple(float(entry["logprob"]) for entry in content)


def token_versions(spans: Sequence[Mapping[str, Any]], length: int) -> tuple[int, ...]:
    """The version of each token, from the server's spans. Raises :class:`Refused` for weights that are not ours.

    >>> spans = [{"version": "kl_comedy/3", "start": 0, "end": 2}, {"version": "kl_comedy/4", "start": 2, "end": 3}]
    >>> token_versions(spans, 3)
    (3, 3, 4)
    """
    versions: list[int] = []
    for span in spans:
        label = str(span["version"])
        if not label.startswith(LABEL):
            raise Refused(409, f"tokens were drawn with weights that this run did not send (label {label!r})")
        versions += [int(label.removeprefix(LABEL))] * (int(span["end"]) - int(span["start"]))
    if len(versions) != length:
        raise Refused(409, f"it names the weight version of {len(versions)} of {length} tokens")
    return tuple(versions)
