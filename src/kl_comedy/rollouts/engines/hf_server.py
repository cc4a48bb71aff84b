"""An inference server over transformers, with the routes of vLLM that our client uses. Run it with ``python -m``.

    uvicorn's thread -> queues -> the main thread: one batch after another; between two tokens, new weights and probes

It draws as the ``hf`` backend does, with the same random numbers, in the precision that the request names. It needs
FastAPI and uvicorn, which the extra ``train`` brings: ``pip install 'kl_comedy[train]'``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kl_comedy.config.schema import ModelConfig
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
from kl_comedy.rollouts.engines.vllm import RequireKey
from kl_comedy.rollouts.hf import HFRollouts, check_request, uniform_numbers

NO_PROBLEM = Problem(id="", text="", answer="")
"""Requests have token ids only, and a :class:`Prompt` has a problem."""
MAX_BODY_BYTES = 128 * 2**20
"""The longest body of a request: 512 prompts of 32,000 tokens, at eight characters per token."""
MAX_RANDOM_NUMBERS = 2**30
"""The most random numbers of one group, one per token of its rows and of the rows before it: 8 GiB while they are
drawn."""
REQUEST_SECONDS = 60.0
"""How long a client may take to send its request, body included: what a client that sends nothing costs at most is a
connection for this long."""
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

    def submit(self, work: Callable[[], Any], *, urgent: bool) -> Future[Any]:
        """Run ``work`` in the computing thread; the future gets what it returns or raises.

        Urgent work comes between two tokens of a batch, other work between batches.
        """
        future: Future[Any] = Future()
        with self._changed:
            # Two queues, because a long batch must not delay new weights by its whole length.
            jobs = self._urgent if urgent else self._batches
            jobs.append((future, work))
            self._changed.notify_all()
        return future

    def run(self) -> None:
        """Compute what requests ask for, until :meth:`stop`."""
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
            records_kept=first["records_kept"],
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
        """A completion as vLLM gives it; beside that the ids that a truncation kept at each token, where asked for."""
        spans = []
        start = 0
        for version, tokens in itertools.groupby(completion.versions):
            end = start + len(list(tokens))
            spans.append({"version": self._labels[version], "start": start, "end": end})
            start = end
        logprobs = {"content": [{"logprob": logp} for logp in completion.logps]}
        choice = {"index": index, "token_ids": completion.ids, "logprobs": logprobs, "weight_versions": spans}
        if completion.kept:
            choice["kept"] = [ids_K.tolist() for ids_K in completion.kept]
        return choice

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        """Raise :class:`UserError`, in vLLM's words, for an id without an embedding."""
        vocabulary = int(self.loaded.causal.get_input_embeddings().weight.shape[0])
        if not all(0 <= token < vocabulary for token in ids):
            raise UserError(f"Token id {max(ids)} is out of vocabulary")


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    """Do ``work`` and give its result or exception to whoever waits for ``future``."""
    # Cancelled where the HTTP side ended meanwhile; from here on it cannot be.
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    # All of them: the computing thread must not end, and the request would wait for ever.
    except BaseException as error:
        future.set_exception(error)


# --- bodies of requests -----------------------------------------------------------------------------------------------

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """A JSON object with these fields and no others: to ignore one would do something else than the client asked for.

    Values are not converted: a number is no text, and true is no number.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SamplingFields(Body):
    """The fields of vLLM's ``SamplingParams`` that this server takes, with vLLM's defaults.

    Those after ``prompt_logprobs`` change nothing here.
    """

    temperature: float = Field(ge=0)
    max_tokens: int = Field(ge=1, le=MAX_RANDOM_NUMBERS)
    seed: int = Field(ge=0, lt=2**63)
    n: int = Field(1, ge=1)
    # Rows of random numbers that earlier groups of the call took.
    first_row: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: list[str] = []
    stop_token_ids: list[TokenId] = []
    # Not of vLLM: answers have the tokens that the truncation kept, for a learner that renormalizes over them.
    records_kept: bool = False
    prompt_logprobs: int | None = Field(None, ge=0)
    logprobs: int | None = None
    ignore_eos: bool = True
    detokenize: bool = True
    include_stop_str_in_output: bool = True
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _fields_fit(self) -> SamplingFields:
        most_rows = MAX_RANDOM_NUMBERS // self.max_tokens
        if self.first_row + self.n > most_rows:
            reason = f"{self.max_tokens} tokens each, after {self.first_row} rows of earlier groups"
            raise bad_value("n", self.n, f"at most {max(most_rows - self.first_row, 0)}", reason)
        if self.prompt_logprobs is not None and self.temperature == 0:
            raise bad_value("temperature", self.temperature, "above 0 where prompt_logprobs are asked for")
        return self


class Group(Body):
    """A prompt to complete. ``autocast``: the precision; None: that of the weights."""

    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: SamplingFields
    autocast: Literal["bfloat16", "float16"] | None = None
    # A field of vLLM's; this server has one model.
    model: str | None = None


class Groups(Body):
    """Several prompts, drawn as one batch, with one precision and one sampling but for seeds and sizes."""

    groups: list[Group] = Field(min_length=1)

    @model_validator(mode="after")
    def _groups_agree(self) -> Groups:
        first = self.groups[0]
        names = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "records_kept", "stop", "stop_token_ids")
        for number, group in enumerate(self.groups):
            if group.autocast != first.autocast:
                raise bad_value(f"groups.{number}.autocast", group.autocast, "that of the first group")
            # One batch is drawn with one sampling; only seeds and group sizes may differ.
            for name in names:
                value = getattr(group.sampling_params, name)
                expected = getattr(first.sampling_params, name)
                if value != expected:
                    allowed = f"that of the first group, {expected!r}"
                    raise bad_value(f"groups.{number}.sampling_params.{name}", value, allowed)
        return self


def _number_of_groups(body: Any) -> str:
    has_several = isinstance(body, dict) and "groups" in body
    return "several" if has_several else "one"


# Without the tag an error would name the fields of both.
GroupOrGroups = Annotated[
    Annotated[Group, Tag("one")] | Annotated[Groups, Tag("several")], Discriminator(_number_of_groups)
]


class ReloadArguments(Body):
    weights_path: str


class Reload(Body):
    method: Literal["reload_weights"]
    kwargs: ReloadArguments


class Label(Body):
    new_version: str


class AddressFields(Body):
    """Those of :class:`TrainerAddress`."""

    host: str
    port: int
    secret: str
    timeout_s: float


class Address(Body):
    init_info: AddressFields


class UpdateInfo(Body):
    """The weights that follow, in order. ``aliases``: further names of tied weights, each with its first name."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    aliases: dict[str, str] = {}

    @model_validator(mode="after")
    def _fields_fit(self) -> UpdateInfo:
        for name in ("dtype_names", "shapes"):
            count = len(getattr(self, name))
            if count != len(self.names):
                raise bad_value(name, count, f"one for each of the {len(self.names)} names")
        for alias, name in self.aliases.items():
            if name not in self.names:
                raise bad_value(f"aliases.{alias}", name, "one of names")
        return self


class Update(Body):
    update_info: UpdateInfo


class Check(Body):
    action: Literal["checksum"] = "checksum"


# --- routes -----------------------------------------------------------------------------------------------------------

SUCCESS = {"success": True}

# Every route is a coroutine: one that is no coroutine takes one of 40 threads, and 40 requests that wait for the end of
# a pause would keep out the one that ends it.
router = APIRouter()


async def _engine_of(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


Served = Annotated[Engine, Depends(_engine_of)]


async def compute(engine: Engine, work: Callable[[], Any], *, urgent: bool) -> Any:
    """What ``work`` returns in the computing thread; see :meth:`Engine.submit`."""
    return await asyncio.wrap_future(engine.submit(work, urgent=urgent))


async def change(engine: Engine, work: Callable[[], Any]) -> dict[str, Any]:
    """Make a change of the engine between two tokens."""
    await compute(engine, work, urgent=True)
    return SUCCESS


@router.get("/health")
async def health() -> dict[str, Any]:
    return {}


@router.get("/v1/models")
async def models(engine: Served) -> dict[str, Any]:
    return engine.identity()


@router.get("/version")
async def version() -> dict[str, Any]:
    return {"version": "kl_comedy hf_server"}


@router.get("/get_world_size")
async def world_size() -> dict[str, Any]:
    return {"world_size": 1}


@router.get("/weight_info")
async def weight_info(engine: Served) -> dict[str, Any]:
    return {"weight_version": engine.label}


@router.post("/pause")
async def pause(engine: Served) -> dict[str, Any]:
    return await change(engine, lambda: engine.pause(True))


@router.post("/resume")
async def resume(engine: Served) -> dict[str, Any]:
    return await change(engine, lambda: engine.pause(False))


@router.post("/collective_rpc")
async def reload(engine: Served, body: Reload) -> dict[str, Any]:
    return await change(engine, lambda: engine.reload(Path(body.kwargs.weights_path)))


@router.post("/init_weight_transfer_engine")
async def set_trainer(engine: Served, body: Address) -> dict[str, Any]:
    address = TrainerAddress(**body.init_info.model_dump())
    return await change(engine, lambda: engine.set_trainer(address))


@router.post("/update_weights")
async def update_weights(engine: Served, body: Update) -> dict[str, Any]:
    return await change(engine, lambda: engine.receive(body.update_info.model_dump()))


@router.post("/update_weight_version")
async def set_label(engine: Served, body: Label) -> dict[str, Any]:
    return await change(engine, lambda: engine.set_label(body.new_version))


@router.post("/start_weight_update")
@router.post("/finish_weight_update")
@router.post("/reset_prefix_cache")
async def nothing_to_do() -> dict[str, Any]:
    """Calls that vLLM needs around an update. Here /update_weights does all of it."""
    return SUCCESS


@router.post("/weight_checker")
async def checksums(engine: Served, body: Check) -> Response:
    return _answer({"checksums": await compute(engine, engine.checksums, urgent=True)})


@router.post(GENERATE)
async def generate(engine: Served, body: GroupOrGroups) -> Response:
    fields = body.model_dump()
    if isinstance(body, Groups):
        answers = await compute(engine, lambda: engine.generate(fields["groups"]), urgent=False)
        return _answer({"groups": answers})
    if body.sampling_params.prompt_logprobs is not None:
        # Urgent, so that the check after an update does not wait for a batch to end.
        sampling = fields["sampling_params"]
        return _answer(await compute(engine, lambda: engine.probe(body.token_ids, sampling), urgent=True))
    answers = await compute(engine, lambda: engine.generate([fields]), urgent=False)
    return _answer(answers[0])


def _answer(content: Any) -> Response:
    """``content`` as JSON. Numbers that are not finite pass: the client says what is wrong with the weights."""
    # FastAPI's own encoder walks each list and refuses such numbers.
    return Response(json.dumps(content), media_type="application/json")


def _error(status: int, text: str) -> Response:
    return JSONResponse({"detail": text[:MAX_ERROR_CHARACTERS]}, status)


async def wrong_body(request: Request, error: Any) -> Response:
    """The answer to a body that its route does not take. FastAPI's own repeats the body."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    # For what is no JSON the reason stands here.
    reason = first.get("ctx", {}).get("error", "")
    return _error(400, f"{field}: {first['msg']} {reason}")


async def refused(request: Request, error: Exception) -> Response:
    """The answer where the engine refuses what is asked."""
    return _error(400, str(error))


async def failed(request: Request, error: Exception) -> Response:
    """The answer of one line where the engine fails. Its traceback is in the log, where uvicorn writes it."""
    return _error(500, f"{type(error).__name__}: {error}")


def application(engine: Engine, key: str) -> FastAPI:
    """The routes, and what a request must pass before them: the key, then the length of its body."""
    # UserError is a ValueError.
    handlers: dict[Any, Any] = {RequestValidationError: wrong_body, ValueError: refused, Exception: failed}
    # openapi_url: no pages that describe the routes.
    app = FastAPI(openapi_url=None, exception_handlers=handlers)
    app.state.engine = engine
    app.include_router(router)
    app.add_middleware(LimitBody)
    # Added last, so that it comes first: of a request without the key nothing more is read.
    app.add_middleware(RequireKey, key=key)
    return app


class LimitBody:
    """ASGI middleware: 413 to a body of more than :data:`MAX_BODY_BYTES`, and no more of it is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def receive_part() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                # close: uvicorn would read the rest of the body, and throw it away.
                raise HTTPException(413, f"a body has at most {MAX_BODY_BYTES} bytes", {"connection": "close"})
            return message

        await self._app(scope, receive_part, send)


class Connection(H11Protocol):
    """Closes a connection whose first request is not whole within :data:`REQUEST_SECONDS`: uvicorn would wait for ever.

    Our client sends one request through each connection.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self._close_unless_whole)

    def _close_unless_whole(self) -> None:
        if self.cycle is None or self.cycle.more_body:
            self.transport.close()


def listen(engine: Engine, *, port: int, key: str, host: str = LOOPBACK) -> uvicorn.Server:
    """Answer requests to ``host`` in a thread, until ``should_exit`` of the returned server is set.

    Raises OSError for a port that is in use.
    """
    # Bound here: where uvicorn cannot, it ends its thread without an error.
    listener = socket.create_server((host, port))
    config = uvicorn.Config(
        application(engine, key),
        http=Connection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        # Errors alone, to the standard error output: strangers would fill the log with warnings.
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
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
