"""An inference server over transformers, with those routes of vLLM that our client uses. ``python -m`` this module.

    HTTP threads -> queues -> the main thread: one batch after another; between two tokens of it new weights and probes

It draws as the ``hf`` backend does, with the same random numbers, in the precision that the request names.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from kl_comedy.config.schema import ModelConfig
from kl_comedy.cuda import leave_memory_unfilled
from kl_comedy.errors import UserError
from kl_comedy.models import LoadedModel, load_model
from kl_comedy.models.load import load_tokenizer, pick_device, place
from kl_comedy.models.sharding import unsharded_skeleton
from kl_comedy.models.weights import Checksums, full_weights
from kl_comedy.processes import LOOPBACK
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts.base import Sampling
from kl_comedy.rollouts.decoding import Completion, pick
from kl_comedy.rollouts.engines.client import GENERATE
from kl_comedy.rollouts.engines.options import KEY_VARIABLE
from kl_comedy.rollouts.engines.transports import TrainerAddress, receive
from kl_comedy.rollouts.hf import HFRollouts, check_request, uniform_numbers

NO_PROBLEM = Problem(id="", text="", answer="")


class Engine:
    """The model and its queues. Everything that computes runs in the thread that called :meth:`run`."""

    def __init__(self, loaded: LoadedModel, *, batch_sequences: int, use_library: bool = False) -> None:
        loaded.model.requires_grad_(False)
        self.loaded = loaded
        self._sampler = HFRollouts(loaded, batch_sequences=batch_sequences, use_library=use_library)
        self._labels: list[str] = []
        self.set_label("default")
        if self._sampler.own_loop():
            self._sampler.call_before_each_pass(self._between_tokens)
        self._changed = threading.Condition()
        self._batches: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._urgent: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._paused = self._ended = False
        self._trainer: TrainerAddress | None = None

    def call(self, work: Callable[[], Any], *, urgent: bool) -> Any:
        """What ``work`` returns or raises in the computing thread; urgent work comes between two tokens of a batch."""
        future: Future[Any] = Future()
        with self._changed:
            (self._urgent if urgent else self._batches).append((future, work))
            self._changed.notify_all()
        return future.result()

    def run(self) -> None:
        """Compute what is asked for, until :meth:`stop`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._urgent or (self._batches and not self._paused))
                if self._ended:
                    return
                job = (self._urgent or self._batches).popleft()
            _settle(*job)

    def stop(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _between_tokens(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or not self._paused)
                if not self._urgent:
                    return
                job = self._urgent.popleft()
            _settle(*job)

    # --- what can be asked for ----------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        self._paused = paused

    def set_label(self, label: str) -> None:
        """Name the weights. Tokens are stamped with the number of the label; :meth:`choice` gives the label back."""
        self.label, self._sampler.version = label, len(self._labels)
        self._labels.append(label)

    def identity(self) -> dict[str, Any]:
        context = getattr(self.loaded.model.config, "max_position_embeddings", None)
        return {"data": [{"id": "policy", "max_model_len": context}]}

    @torch.no_grad()
    def reload(self, folder: Path) -> None:
        """Overwrite every weight by those of a checkpoint. Raises :class:`UserError`, having changed nothing, where
        names or shapes differ."""
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in folder.glob("*.safetensors")]
            given = {name: file for file in files for name in file.keys()}  # noqa: SIM118  (a file is no mapping)
            state = self._checked_state({name: file.get_slice(name).get_shape() for name, file in given.items()})
            for name, file in given.items():
                state[name].copy_(file.get_tensor(name))

    def set_trainer(self, address: Mapping[str, Any]) -> None:
        """Take note of where the trainer will be met."""
        self._trainer = TrainerAddress(**address)

    @torch.no_grad()
    def receive(self, info: Mapping[str, Any]) -> None:
        """Overwrite every weight by what the trainer sends. Raises as :meth:`reload`."""
        if self._trainer is None:
            raise UserError("/init_weight_transfer_engine comes first")
        shapes = dict(zip(info["names"], info["shapes"], strict=True))
        state = self._checked_state(shapes | {alias: shapes[name] for alias, name in info["aliases"].items()})
        for name, tensor in receive(self._trainer, 1, info):
            state[name].copy_(tensor)

    def _checked_state(self, shapes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.loaded.causal.state_dict()
        names = shapes.keys() ^ state.keys()
        names = names or {name for name in state if list(shapes[name]) != list(state[name].shape)}
        if names:
            raise UserError(f"weights of another model (names or shapes): {', '.join(sorted(names)[:3])}")
        return state

    def checksums(self) -> dict[str, str]:
        """Of the weights that are computed with, from their memory."""
        checksums = Checksums(fused=True)
        for name, tensor in full_weights(self.loaded.model):
            checksums.add(name, tensor)
        return checksums.hexdigests()

    @torch.no_grad()
    def probe(self, ids: list[int], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Untempered log-probs of a prompt's tokens and of the ``prompt_logprobs`` likeliest in their places, and draws
        of the next one at the temperature."""
        self._check_vocabulary(ids)
        with torch.autocast(self.loaded.device.type, enabled=False):
            logits = self.loaded.model(input_ids=torch.tensor([ids], device=self.loaded.device), use_cache=False)
            logits_SV = logits.logits[0].float().cpu()
        prompt_SV, next_V = logits_SV[:-1].log_softmax(-1), (logits_SV[-1] / fields["temperature"]).log_softmax(-1)
        uniform_N = uniform_numbers(fields["seed"], fields["n"], 1)[:, 0]
        drawn = pick(next_V.expand(fields["n"], -1), uniform_N).tolist()
        top_SK = prompt_SV.topk(min(fields["prompt_logprobs"], prompt_SV.shape[1])).indices.tolist()
        entries = [
            {str(each): {"logprob": float(prompt_SV[n, each])} for each in (*top_SK[n], token)}
            for n, token in enumerate(ids[1:])
        ]
        completions = [Completion(ids=[token], logps=[float(next_V[token])]) for token in drawn]
        choices = [self.choice(n, completion) for n, completion in enumerate(completions)]
        return {"prompt_logprobs": [None, *entries], "choices": choices}

    def generate(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer for each group, as vLLM gives it. All groups have the settings and precision of the first."""
        fields = [group["sampling_params"] for group in groups]
        first, autocast = fields[0], groups[0].get("autocast")
        names = ("temperature", "top_p", "top_k", "min_p")
        sampling = Sampling(
            **{name: first[name] for name in names},
            max_new_tokens=first["max_tokens"],
            stop=tuple(first.get("stop", ())),
        )
        prompts = [Prompt(problem=NO_PROBLEM, text="", token_ids=tuple(group["token_ids"])) for group in groups]
        check_request(self.loaded, prompts, sampling)
        for prompt in prompts:
            self._check_vocabulary(prompt.token_ids)
        uniform = [
            uniform_numbers(each["seed"], each.get("first_row", 0) + each["n"], each["max_tokens"])[-each["n"] :]
            for each in fields
        ]
        kind, precision = self.loaded.device.type, None if autocast is None else getattr(torch, autocast)
        with torch.no_grad(), torch.autocast(kind, precision, enabled=autocast is not None, cache_enabled=False):
            completions = self._sampler.draw(
                prompts,
                [n for n, each in enumerate(fields) for _ in range(each["n"])],
                sampling=sampling,
                uniform_BT=torch.cat(uniform),
                ends=first["stop_token_ids"],
            )
        rest = iter(completions)
        rows = [itertools.islice(rest, each["n"]) for each in fields]
        return [{"choices": [self.choice(n, completion) for n, completion in enumerate(group)]} for group in rows]

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """A completion as vLLM gives it."""
        spans, start = [], 0
        for number, tokens in itertools.groupby(completion.versions):
            end = start + len(list(tokens))
            spans.append({"version": self._labels[number], "start": start, "end": end})
            start = end
        logprobs = {"content": [{"logprob": logp} for logp in completion.logps]}
        return {"index": index, "token_ids": completion.ids, "logprobs": logprobs, "weight_versions": spans}

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        entries = int(self.loaded.causal.get_input_embeddings().weight.shape[0])
        if not all(0 <= token < entries for token in ids):
            raise UserError(f"Token id {max(ids)} is out of vocabulary")


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def answer(engine: Engine, path: str, body: Any) -> Any:
    """The content of the answer to a request; None where there is no such route."""
    changes: dict[str, Callable[[], Any]] = {
        "/pause": lambda: engine.pause(True),
        "/resume": lambda: engine.pause(False),
        "/collective_rpc": lambda: engine.reload(Path(body["kwargs"]["weights_path"])),
        "/init_weight_transfer_engine": lambda: engine.set_trainer(body["init_info"]),
        "/start_weight_update": lambda: None,
        "/update_weights": lambda: engine.receive(body["update_info"]),
        "/finish_weight_update": lambda: None,
        "/update_weight_version": lambda: engine.set_label(body["new_version"]),
        "/reset_prefix_cache": lambda: None,
    }
    if path in changes:
        engine.call(changes[path], urgent=True)
        return {"success": True}
    if path == GENERATE:
        groups = body.get("groups") or [body]
        fields, ids = groups[0]["sampling_params"], groups[0]["token_ids"]
        if fields.get("prompt_logprobs") is not None:
            return engine.call(lambda: engine.probe(ids, fields), urgent=True)
        answers = engine.call(lambda: engine.generate(groups), urgent=False)
        return {"groups": answers} if "groups" in body else answers[0]
    information: dict[str, Callable[[], Any]] = {
        "/health": dict,
        "/v1/models": engine.identity,
        "/version": lambda: {"version": "kl_comedy hf_server"},
        "/get_world_size": lambda: {"world_size": 1},
        "/weight_info": lambda: {"weight_version": engine.label},
        "/weight_checker": lambda: {"checksums": engine.call(engine.checksums, urgent=True)},
    }
    return information[path]() if path in information else None


class Handler(BaseHTTPRequestHandler):
    """Requests with the key, to :func:`answer`."""

    protocol_version = "HTTP/1.1"

    def __init__(self, engine: Engine, key: str, *arguments: Any) -> None:
        self.engine, self._expected = engine, f"Bearer {key}"
        super().__init__(*arguments)

    def do_GET(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        if not hmac.compare_digest(self.headers.get("authorization", "").encode(), self._expected.encode()):
            self.send(401, {"error": "Unauthorized"})
            return
        path, content = urlsplit(self.path).path, None
        try:
            content = answer(self.engine, path, json.loads(data or b"{}"))
            status, content = (404, {"error": f"no such route: {path}"}) if content is None else (200, content)
        except ValueError as error:  # UserError too
            status, content = 400, {"error": str(error)}
        except Exception as error:
            traceback.print_exception(error)
            status, content = 500, {"error": f"{type(error).__name__}: {error}"}
        self.send(status, content)

    do_POST = do_GET

    def send(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


def listen(engine: Engine, *, port: int, key: str, host: str = LOOPBACK) -> ThreadingHTTPServer:
    """Answer requests to ``host`` from threads, until the returned server is shut down."""
    server = ThreadingHTTPServer((host, port), lambda *arguments: Handler(engine, key, *arguments))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def load_folder(config: ModelConfig) -> LoadedModel:
    """The model of a folder. Without weights in it the model has none that count; they are still to come."""
    if any(Path(config.source).glob("*.safetensors")):
        return load_model(config)
    device, model = pick_device(config.device), unsharded_skeleton(config)
    place(model, device)
    return LoadedModel(model=model, tokenizer=load_tokenizer(config), device=device, source=config.source)


def serve(settings: Mapping[str, Any], key: str) -> None:
    """Serve a checkpoint folder for ever. ``settings`` as :class:`~kl_comedy.rollouts.engines.servers.HFServers`
    writes them."""
    torch.set_num_threads(settings["threads"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    leave_memory_unfilled()
    names = ("dtype", "device", "attention", "head_dtype")
    config = ModelConfig(source=settings["folder"], **{name: settings[name] for name in names})
    batch_sequences, use_library = settings["batch_sequences"], settings["use_library"]
    engine = Engine(load_folder(config), batch_sequences=batch_sequences, use_library=use_library)
    listen(engine, host=settings["host"], port=settings["port"], key=key)
    engine.run()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), os.environ[KEY_VARIABLE])
