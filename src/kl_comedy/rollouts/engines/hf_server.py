"""An inference server over transformers, with the routes of vLLM that our client uses. Run it with ``python -m``.

    HTTP threads -> queues -> the main thread: one batch after another; between two tokens, new weights and probes

It draws as the ``hf`` backend does, with the same random numbers, in the precision that the request names.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from kl_comedy.config.schema import ModelConfig
from kl_comedy.config.validate import option, parse_record
from kl_comedy.cuda import leave_memory_unfilled
from kl_comedy.errors import UserError, bad_value
from kl_comedy.models import LoadedModel, load_model
from kl_comedy.models.load import load_tokenizer, pick_device, place
from kl_comedy.models.sharding import unsharded_skeleton
from kl_comedy.models.weights import Checksums, full_weights
from kl_comedy.processes import LOOPBACK
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts.base import Sampling
from kl_comedy.rollouts.decoding import Completion, pick
from kl_comedy.rollouts.engines.client import GENERATE, check_key
from kl_comedy.rollouts.engines.options import KEY_VARIABLE
from kl_comedy.rollouts.engines.transports import TrainerAddress, receive
from kl_comedy.rollouts.hf import HFRollouts, check_request, uniform_numbers

NO_PROBLEM = Problem(id="", text="", answer="")
"""Requests have token ids only, and a :class:`Prompt` has a problem."""
MAX_BODY_BYTES = 128 * 2**20
"""The longest body of a request: 512 prompts of 32,000 tokens, at eight characters per token."""
MAX_RANDOM_NUMBERS = 2**30
"""The most random numbers of one group, one per token of its rows and of the rows before it: 8 GiB while they are
drawn."""
HEAD_SECONDS = 30.0
"""How long a client may take to send its request line and headers. This and the two limits below bound what a client
that sends nothing costs: a thread for this long."""
BODY_SECONDS = 60.0
"""How long a client may take to send the body."""
ANSWER_SECONDS = 60.0
"""How long a client may take to accept a part of the answer."""
LISTEN_QUEUE = 1024
"""Connections that the kernel holds until a thread accepts them. Our client opens one per request in progress and uses
none twice, so that a batch begins with as many as it has requests; those beyond the queue would be reset."""
MAX_ERROR_CHARACTERS = 1000

_Job = tuple["Future[Any]", Callable[[], Any]]
"""Work for the computing thread, and where its result goes."""


class Engine:
    """The model and its queues. All computation runs in the thread that called :meth:`run`."""

    def __init__(self, loaded: LoadedModel, *, batch_sequences: int, use_library: bool = False) -> None:
        # A server never learns, and autograd would keep every activation of a batch.
        loaded.model.requires_grad_(False)
        self.loaded = loaded
        self._sampler = HFRollouts(loaded, batch_sequences=batch_sequences, use_library=use_library)
        self._labels: list[str] = []
        self.set_label("default")
        if self._sampler.own_loop():
            self._sampler.call_before_each_pass(self._between_tokens)
        self._changed = threading.Condition()
        self._batches: deque[_Job] = deque()
        self._urgent: deque[_Job] = deque()
        self._paused = False
        self._ended = False
        self._trainer: TrainerAddress | None = None

    def call(self, work: Callable[[], Any], *, urgent: bool) -> Any:
        """Run ``work`` in the computing thread; returns or raises what it does.

        Urgent work comes between two tokens of a batch, other work between batches.
        """
        future: Future[Any] = Future()
        with self._changed:
            # Two queues, because a long batch must not delay new weights by its whole length.
            jobs = self._urgent if urgent else self._batches
            jobs.append((future, work))
            self._changed.notify_all()
        return future.result()

    def run(self) -> None:
        """Compute what HTTP threads ask for, until :meth:`stop`."""
        while True:
            with self._changed:
                self._changed.wait_for(self._can_continue)
                if self._ended:
                    return
                # Urgent work first, and while paused nothing else: the call that ends a pause is urgent.
                if self._urgent:
                    job = self._urgent.popleft()
                else:
                    job = self._batches.popleft()
            _settle(*job)

    def _can_continue(self) -> bool:
        if self._ended or self._urgent:
            return True
        return bool(self._batches) and not self._paused

    def stop(self) -> None:
        """Let :meth:`run` return after the work in progress."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _between_tokens(self) -> None:
        """Do urgent work, and wait while paused; called before each pass of a batch."""
        while True:
            with self._changed:
                # While paused it waits here, and urgent work must go on, or nothing could end the pause.
                self._changed.wait_for(lambda: self._urgent or not self._paused)
                if not self._urgent:
                    return
                job = self._urgent.popleft()
            _settle(*job)

    # --- requests -----------------------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Draw no tokens until the pause ends."""
        self._paused = paused

    def set_label(self, label: str) -> None:
        """Name the weights. The version of a token is the index of the label; :meth:`choice` answers the label."""
        self.label = label
        self._sampler.version = len(self._labels)
        # Never shortened: a completion in progress may have tokens of any earlier label.
        self._labels.append(label)

    def identity(self) -> dict[str, Any]:
        """The models of this server, as vLLM lists them."""
        context = getattr(self.loaded.model.config, "max_position_embeddings", None)
        return {"data": [{"id": "policy", "max_model_len": context}]}

    @torch.no_grad()
    def reload(self, folder: Path) -> None:
        """Overwrite every weight by that of a checkpoint.

        Raises :class:`UserError`, before anything is changed, where names or shapes differ.
        """
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            file_of: dict[str, Any] = {}
            for path in folder.glob("*.safetensors"):
                file = stack.enter_context(safe_open(path, framework="pt"))
                file_of.update(dict.fromkeys(file.keys(), file))
            # Shapes from the files' headers: everything is checked before the first weight is overwritten.
            shapes = {name: file.get_slice(name).get_shape() for name, file in file_of.items()}
            state = self._checked_state(shapes)
            for name, file in file_of.items():
                state[name].copy_(file.get_tensor(name))

    def set_trainer(self, address: TrainerAddress) -> None:
        """Remember where the trainer will send weights from."""
        self._trainer = address

    @torch.no_grad()
    def receive(self, info: Mapping[str, Any]) -> None:
        """Overwrite every weight by what the trainer sends. Raises as :meth:`reload`."""
        if self._trainer is None:
            raise UserError("/init_weight_transfer_engine comes first")
        shapes = dict(zip(info["names"], info["shapes"], strict=True))
        for alias, name in info["aliases"].items():
            shapes[alias] = shapes[name]
        state = self._checked_state(shapes)
        for name, tensor in receive(self._trainer, 1, info):
            state[name].copy_(tensor)

    def _checked_state(self, shapes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The model's weights by name. Raises :class:`UserError` unless they have exactly these names and shapes."""
        state: dict[str, torch.Tensor] = self.loaded.causal.state_dict()
        # Both ways: a weight that is missing would keep its older value without an error.
        wrong = shapes.keys() ^ state.keys()
        if not wrong:
            wrong = {name for name in state if list(shapes[name]) != list(state[name].shape)}
        if wrong:
            raise UserError(f"weights of another model (names or shapes): {', '.join(sorted(wrong)[:3])}")
        return state

    def checksums(self) -> dict[str, str]:
        """SHA-256 of the weights in the memory that the model computes with, by name."""
        checksums = Checksums(fused=True)
        for name, tensor in full_weights(self.loaded.model):
            checksums.add(name, tensor)
        return checksums.hexdigests()

    @torch.no_grad()
    def probe(self, ids: Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of vLLM to a request with ``prompt_logprobs``: log-probs of a prompt, and draws of one more token.

        Those of the prompt are untempered, of its tokens and of the ``prompt_logprobs`` likeliest at each position. The
        next token is drawn at the temperature, without truncation.
        """
        self._check_vocabulary(ids)
        # Without autocast, as the trainer's side of a probe.
        with torch.autocast(self.loaded.device.type, enabled=False):
            ids_1S = torch.tensor([list(ids)], device=self.loaded.device)
            logits_SV = self.loaded.model(input_ids=ids_1S, use_cache=False).logits[0].float().cpu()
        prompt_SV = logits_SV[:-1].log_softmax(-1)
        next_V = (logits_SV[-1] / fields["temperature"]).log_softmax(-1)

        most_tokens = min(fields["prompt_logprobs"], prompt_SV.shape[1])
        top_SK = prompt_SV.topk(most_tokens).indices.tolist()
        # vLLM has no log-prob for the first token, which follows nothing.
        prompt_logprobs: list[dict[str, Any] | None] = [None]
        for position, token in enumerate(ids[1:]):
            tokens = [*top_SK[position], token]
            prompt_logprobs.append({str(token): {"logprob": float(prompt_SV[position, token])} for token in tokens})

        uniform_N = uniform_numbers(fields["seed"], fields["n"], 1)[:, 0]
        drawn = pick(next_V.expand(fields["n"], -1), uniform_N).tolist()
        choices = []
        for index, token in enumerate(drawn):
            completion = Completion(ids=[token], logps=[float(next_V[token])])
            choices.append(self.choice(index, completion))
        return {"prompt_logprobs": prompt_logprobs, "choices": choices}

    def generate(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer per group, as vLLM gives it. All groups have the settings and precision of the first."""
        fields = [group["sampling_params"] for group in groups]
        first = fields[0]
        sampling = Sampling(
            temperature=first["temperature"],
            max_new_tokens=first["max_tokens"],
            top_p=first["top_p"],
            top_k=first["top_k"],
            min_p=first["min_p"],
            stop=first["stop"],
        )
        prompts = [Prompt(problem=NO_PROBLEM, text="", token_ids=tuple(group["token_ids"])) for group in groups]
        check_request(self.loaded, prompts, sampling)
        for prompt in prompts:
            self._check_vocabulary(prompt.token_ids)

        group_of_row: list[int] = []
        uniform_parts = []
        for number, group_fields in enumerate(fields):
            size = group_fields["n"]
            group_of_row += [number] * size
            # Those of the whole call up to this group, of which it takes the last: as the hf backend draws them.
            rows = group_fields["first_row"] + size
            uniform = uniform_numbers(group_fields["seed"], rows, group_fields["max_tokens"])
            uniform_parts.append(uniform[-size:])

        with torch.no_grad(), self._autocast(groups[0]["autocast"]):
            completions = self._sampler.draw(
                prompts,
                group_of_row,
                sampling=sampling,
                uniform_BT=torch.cat(uniform_parts),
                ends=first["stop_token_ids"],
            )
        remaining = iter(completions)
        answers = []
        for group_fields in fields:
            group_completions = itertools.islice(remaining, group_fields["n"])
            choices = [self.choice(index, completion) for index, completion in enumerate(group_completions)]
            answers.append({"choices": choices})
        return answers

    def _autocast(self, dtype: str | None) -> torch.autocast:
        """The precision that a request names; None: that of the weights."""
        device_type = self.loaded.device.type
        if dtype is None:
            return torch.autocast(device_type, enabled=False, cache_enabled=False)
        # Without the cache of cast weights: they may be replaced between two tokens.
        return torch.autocast(device_type, getattr(torch, dtype), cache_enabled=False)

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """A completion as vLLM gives it."""
        spans = []
        start = 0
        for version, tokens in itertools.groupby(completion.versions):
            end = start + len(list(tokens))
            spans.append({"version": self._labels[version], "start": start, "end": end})
            start = end
        logprobs = {"content": [{"logprob": logp} for logp in completion.logps]}
        return {"index": index, "token_ids": completion.ids, "logprobs": logprobs, "weight_versions": spans}

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        """Raise :class:`UserError`, in vLLM's words, for an id without an embedding."""
        vocabulary = int(self.loaded.causal.get_input_embeddings().weight.shape[0])
        if not all(0 <= token < vocabulary for token in ids):
            raise UserError(f"Token id {max(ids)} is out of vocabulary")


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    """Do ``work`` and give its result or exception to the thread that waits for ``future``."""
    try:
        future.set_result(work())
    # All of them: the computing thread must not end, and the thread that waits would wait for ever.
    except BaseException as error:
        future.set_exception(error)


# --- bodies of requests -----------------------------------------------------------------------------------------------


def _token_ids(value: Any, key: str) -> tuple[int, ...]:
    """A checked list of token ids. The validator of configs would take a microsecond for each of them."""
    if not isinstance(value, list):
        raise bad_value(key, value, "a list of token ids")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 2**31:
            raise bad_value(f"{key}.{position}", token, "a token id")
    return tuple(value)


def _prompt_ids(value: Any, key: str) -> tuple[int, ...]:
    ids = _token_ids(value, key)
    if not ids:
        raise bad_value(key, value, "at least one token id")
    return ids


@dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """The fields of vLLM's ``SamplingParams`` that this server takes, with vLLM's defaults.

    Those after ``prompt_logprobs`` change nothing here. A field of another name is refused: to ignore it would give
    other completions than the client asked for.
    """

    temperature: float = option(..., minimum=0)
    max_tokens: int = option(..., minimum=1, maximum=MAX_RANDOM_NUMBERS)
    seed: int = option(..., minimum=0, maximum=2**63 - 1)
    n: int = option(1, minimum=1)
    first_row: int = option(0, "rows of random numbers that earlier groups of the call took", minimum=0)
    top_p: float = option(1.0, above=0, maximum=1)
    top_k: int = option(0, minimum=0)
    min_p: float = option(0.0, minimum=0, maximum=1)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = option((), parse=_token_ids)
    prompt_logprobs: int | None = option(None, minimum=0)
    logprobs: int | None = None
    ignore_eos: bool = True
    detokenize: bool = True
    include_stop_str_in_output: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        most_rows = MAX_RANDOM_NUMBERS // self.max_tokens
        if self.first_row + self.n > most_rows:
            reason = f"{self.max_tokens} tokens each, after {self.first_row} rows of earlier groups"
            raise bad_value("n", self.n, f"at most {max(most_rows - self.first_row, 0)}", reason)
        if self.prompt_logprobs is not None and self.temperature == 0:
            raise bad_value("temperature", self.temperature, "above 0 where prompt_logprobs are asked for")


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt to complete."""

    token_ids: tuple[int, ...] = option(..., parse=_prompt_ids)
    sampling_params: SamplingFields
    autocast: str | None = option(None, "precision; null: the weights'", choices=("bfloat16", "float16"))
    model: str | None = option(None, "a field of vLLM's; this server has one model")

    def fields(self) -> dict[str, Any]:
        return {**vars(self), "sampling_params": vars(self.sampling_params)}


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Several prompts, drawn as one batch, with one precision and one sampling but for seeds and sizes."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise bad_value("groups", [], "at least one")
        first = self.groups[0]
        for number, group in enumerate(self.groups):
            if group.autocast != first.autocast:
                raise bad_value(f"groups.{number}.autocast", group.autocast, "that of the first group")
            # One batch is drawn with one sampling; only seeds and group sizes may differ.
            for name in ("temperature", "max_tokens", "top_p", "top_k", "min_p", "stop", "stop_token_ids"):
                value = getattr(group.sampling_params, name)
                expected = getattr(first.sampling_params, name)
                if value != expected:
                    allowed = f"that of the first group, {expected!r}"
                    raise bad_value(f"groups.{number}.sampling_params.{name}", value, allowed)


@dataclass(frozen=True, kw_only=True)
class ReloadArguments:
    weights_path: str


@dataclass(frozen=True, kw_only=True)
class Reload:
    method: str = option(..., choices=("reload_weights",))
    kwargs: ReloadArguments


@dataclass(frozen=True, kw_only=True)
class Label:
    new_version: str


@dataclass(frozen=True, kw_only=True)
class Address:
    init_info: TrainerAddress


@dataclass(frozen=True, kw_only=True)
class UpdateInfo:
    """The weights that follow, in order. ``aliases``: further names of tied weights, each with its first name."""

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    aliases: dict[str, str] = option(dict)

    def __post_init__(self) -> None:
        for name in ("dtype_names", "shapes"):
            count = len(getattr(self, name))
            if count != len(self.names):
                raise bad_value(name, count, f"one for each of the {len(self.names)} names")
        for alias, name in self.aliases.items():
            if name not in self.names:
                raise bad_value(f"aliases.{alias}", name, "one of names")


@dataclass(frozen=True, kw_only=True)
class Update:
    update_info: UpdateInfo


@dataclass(frozen=True, kw_only=True)
class Check:
    action: str = option("checksum", choices=("checksum",))


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """A body without fields, or none."""


SUCCESS = {"success": True}


def _change(engine: Engine, change: Callable[[], Any]) -> dict[str, Any]:
    """Make a change of the engine between two tokens."""
    engine.call(change, urgent=True)
    return SUCCESS


def _complete(engine: Engine, group: Group) -> Any:
    fields = group.fields()
    if group.sampling_params.prompt_logprobs is not None:
        # Urgent, so that the check after an update does not wait for a batch to end.
        return engine.call(lambda: engine.probe(group.token_ids, fields["sampling_params"]), urgent=True)
    return engine.call(lambda: engine.generate([fields]), urgent=False)[0]


def _complete_all(engine: Engine, body: Groups) -> Any:
    groups = [group.fields() for group in body.groups]
    return {"groups": engine.call(lambda: engine.generate(groups), urgent=False)}


Answer = Callable[[Engine, Any], Any]
ROUTES: Mapping[str, tuple[type, Answer]] = {
    "/pause": (Nothing, lambda engine, body: _change(engine, lambda: engine.pause(True))),
    "/resume": (Nothing, lambda engine, body: _change(engine, lambda: engine.pause(False))),
    "/collective_rpc": (
        Reload,
        lambda engine, body: _change(engine, lambda: engine.reload(Path(body.kwargs.weights_path))),
    ),
    "/init_weight_transfer_engine": (
        Address,
        lambda engine, body: _change(engine, lambda: engine.set_trainer(body.init_info)),
    ),
    # Two calls that vLLM needs around an update. Here /update_weights does all of it.
    "/start_weight_update": (Nothing, lambda engine, body: SUCCESS),
    "/update_weights": (
        Update,
        lambda engine, body: _change(engine, lambda: engine.receive(vars(body.update_info))),
    ),
    "/finish_weight_update": (Nothing, lambda engine, body: SUCCESS),
    "/update_weight_version": (
        Label,
        lambda engine, body: _change(engine, lambda: engine.set_label(body.new_version)),
    ),
    "/reset_prefix_cache": (Nothing, lambda engine, body: SUCCESS),
    "/health": (Nothing, lambda engine, body: {}),
    "/v1/models": (Nothing, lambda engine, body: engine.identity()),
    "/version": (Nothing, lambda engine, body: {"version": "kl_comedy hf_server"}),
    "/get_world_size": (Nothing, lambda engine, body: {"world_size": 1}),
    "/weight_info": (Nothing, lambda engine, body: {"weight_version": engine.label}),
    "/weight_checker": (
        Check,
        lambda engine, body: {"checksums": engine.call(engine.checksums, urgent=True)},
    ),
    GENERATE: (Group, _complete),
}
"""By path: the schema of the body, and what answers it. Errors of a body name the field."""


def answer(engine: Engine, path: str, body: Any) -> Any:
    """The content of the answer to a request. Raises :class:`UserError` for a body that its route does not take."""
    schema, respond = ROUTES[path]
    has_several_groups = isinstance(body, dict) and "groups" in body
    if path == GENERATE and has_several_groups:
        schema = Groups
        respond = _complete_all
    return respond(engine, parse_record(schema, body, key="body"))


def decode_body(data: bytes) -> Any:
    """The JSON of a body; an empty body is an object without fields. Raises ValueError for anything else."""

    # Python's parser accepts NaN and infinities, with which a comparison of the checks below would not fail.
    def refuse(name: str) -> Any:
        raise ValueError(f"the body holds {name}, which is not JSON")

    try:
        return json.loads(data or b"{}", parse_constant=refuse)
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None


# --- connections ------------------------------------------------------------------------------------------------------


class Refusal(Exception):
    """A request that is refused before its body is read as JSON; the connection is then closed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class TimedReader(io.RawIOBase):
    """Reads from a connection until a deadline, after which reading raises TimeoutError.

    The socket's own limit applies to each packet: a client that sends a byte now and then would keep its thread for
    ever.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.allow(HEAD_SECONDS)

    def allow(self, seconds: float) -> None:
        """Set the deadline, from now."""
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the client sends too slowly")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """Passes requests with the key to :func:`answer`. One without the key is refused before its body is read."""

    protocol_version = "HTTP/1.1"

    def __init__(self, engine: Engine, key: str, *arguments: Any) -> None:
        self.engine = engine
        self._expected = f"Bearer {key}"
        # Last: it handles the whole request.
        super().__init__(*arguments)

    def setup(self) -> None:
        """Read by :class:`TimedReader` instead of the base class's file, which has no deadline."""
        super().setup()
        self.rfile.close()
        self._reader = TimedReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._reader.allow(HEAD_SECONDS)
        super().handle_one_request()

    def handle_expect_100(self) -> bool:
        """Send nothing yet: :meth:`_body` asks for the body after the key and the path are checked."""
        return True

    def do_GET(self) -> None:
        try:
            path = self._checked_path()
            data = self._body()
        except Refusal as refusal:
            # The unread body is still in the connection.
            self.close_connection = True
            self.send(refusal.status, {"error": str(refusal)})
            return
        try:
            content = answer(self.engine, path, decode_body(data))
        # UserError is a ValueError.
        except ValueError as error:
            self.send(400, {"error": str(error)[:MAX_ERROR_CHARACTERS]})
        except Exception as error:
            # Into the server's log; the client gets one line.
            traceback.print_exception(error)
            self.send(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self.send(200, content)

    do_POST = do_GET

    def _checked_path(self) -> str:
        """The path of the request. Raises :class:`Refusal` without the key, and for a path without a route."""
        given = self.headers.get("authorization", "")
        # In constant time: the time of `==` tells how many characters are right.
        if not hmac.compare_digest(given.encode(), self._expected.encode()):
            raise Refusal(401, "Unauthorized")
        try:
            path = urlsplit(self.path).path
        except ValueError as error:
            raise Refusal(400, f"no address: {error}") from None
        if path not in ROUTES:
            raise Refusal(404, f"no such route: {path[:MAX_ERROR_CHARACTERS]}")
        return path

    def _body(self) -> bytes:
        """The body of the request. Raises :class:`Refusal` where it is too long, or does not come in time."""
        length = self._content_length()
        if length is None:
            return b""
        if self.headers.get("expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        self._reader.allow(BODY_SECONDS)
        try:
            data = self.rfile.read(length)
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        if len(data) < length:
            raise Refusal(400, "the body is shorter than its Content-Length")
        return data

    def _content_length(self) -> int | None:
        """The length of the body; None without one. Raises :class:`Refusal` for none in a POST, and a wrong one."""
        lengths = self.headers.get_all("content-length", [])
        if "transfer-encoding" in self.headers:
            raise Refusal(411, "a body needs a Content-Length")
        if not lengths:
            if self.command == "POST":
                raise Refusal(411, "a body needs a Content-Length")
            return None
        text = lengths[0]
        # isdigit alone accepts digits of other scripts, and int() spaces and signs.
        is_number = text.isascii() and text.isdigit()
        if len(lengths) > 1 or not is_number:
            raise Refusal(400, "Content-Length is not a number")
        # The count of digits comes first: Python refuses to convert thousands of them.
        if len(text.lstrip("0")) > len(str(MAX_BODY_BYTES)) or int(text) > MAX_BODY_BYTES:
            raise Refusal(413, f"Content-Length is above {MAX_BODY_BYTES}")
        return int(text)

    def send(self, status: int, content: Any) -> None:
        """Answer with ``content`` as JSON."""
        data = json.dumps(content).encode()
        self.connection.settimeout(ANSWER_SECONDS)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if self.close_connection:
            # The unread body of a refused request would be taken for the next request on this connection.
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing per request."""


class Server(ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    request_queue_size = LISTEN_QUEUE

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what was raised, unless a client has left before its answer, which is not an error of this server."""
        # The base class would print a traceback for each client that went away.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def listen(engine: Engine, *, port: int, key: str, host: str = LOOPBACK) -> ThreadingHTTPServer:
    """Answer requests to ``host``, each in a thread, until the returned server is shut down."""
    server = Server((host, port), lambda *arguments: Handler(engine, key, *arguments))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def load_folder(config: ModelConfig) -> LoadedModel:
    """The model of a folder. Where the folder has no weights yet, those of the model are arbitrary."""
    # A folder that was made for weights from memory has a config and a tokenizer only.
    if any(Path(config.source).glob("*.safetensors")):
        return load_model(config)
    device = pick_device(config.device)
    model = unsharded_skeleton(config)
    place(model, device)
    return LoadedModel(model=model, tokenizer=load_tokenizer(config), device=device, source=config.source)


def serve(settings: Mapping[str, Any], key: str) -> None:
    """Serve a checkpoint folder until the process is killed.

    ``settings`` are those that :class:`~kl_comedy.rollouts.engines.servers.HFServers` writes. Raises
    :class:`UserError` for a key that is too short.
    """
    # First, before a port is open.
    check_key(key)
    # Before anything is computed: sums depend on the number of threads, and trainer and server are compared.
    torch.set_num_threads(settings["threads"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    leave_memory_unfilled()
    config = ModelConfig(
        source=settings["folder"],
        dtype=settings["dtype"],
        device=settings["device"],
        attention=settings["attention"],
        head_dtype=settings["head_dtype"],
    )
    loaded = load_folder(config)
    engine = Engine(loaded, batch_sequences=settings["batch_sequences"], use_library=settings["use_library"])
    listen(engine, host=settings["host"], port=settings["port"], key=key)
    engine.run()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), os.environ[KEY_VARIABLE])
