"""Our inference server in this process, on a tiny policy, with faults on request. No process, no vLLM needed."""

import asyncio
import contextlib
import copy
import json
import threading
from urllib.parse import parse_qsl

import pytest
import torch
from fastapi.responses import JSONResponse

from engine_policies import PROMPT, llama, loaded
from kl_comedy.config.schema import RolloutConfig
from kl_comedy.processes import free_port
from kl_comedy.rollouts import Sampling, build_hf_server, build_vllm_server
from kl_comedy.rollouts.engines import hf_server, pool
from kl_comedy.rollouts.engines.client import GENERATE

KEY = "key-of-these-tests"


class FaultyServer:
    """``faults``: how the next ``generate`` requests go wrong, in order: ``500``, ``drop``, ``hang``, ``down``.

    ``answers``: what a path answers instead, ``(status, content)``; ``calls``: the paths that were asked for;
    ``requests``: all of each request that was answered, as method, path, parameters and body.
    """

    def __init__(self, policy, *, batch_sequences=8, key=KEY, **options):
        self.engine = hf_server.Engine(policy, batch_sequences=batch_sequences, **options)
        self.engine.server = self
        self.faults = []
        self.calls = []
        self.requests = []
        self.answers = {}
        self.down = False
        port = free_port()
        self._http = hf_server.listen(self.engine, port=port, key=key)
        self.url = f"http://127.0.0.1:{port}"
        threading.Thread(target=self.engine.run, daemon=True).start()

    def close(self):
        self.engine.stop()
        # Its thread ends some tenths of a second later, for which no test waits.
        self._http.force_exit = True
        self._http.should_exit = True


class Faults:
    """ASGI middleware around our server: records requests, and answers or drops those that its ``faults`` say."""

    def __init__(self, app, server):
        self.app = app
        self.server = server

    async def __call__(self, scope, receive, send):
        server = self.server
        path = scope["path"]
        server.calls.append(path)

        fault = None
        if server.faults and path == GENERATE:
            fault = server.faults.pop(0)
        if fault == "down":
            server.down = True
        if fault == "hang":
            # Longer than every request_timeout_s of these tests: the client gives the request up.
            await asyncio.sleep(30)
        if server.down or fault in ("drop", "hang"):
            # ASGI has no word for it: `send` is a method of uvicorn's record of the request.
            send.__self__.transport.abort()
            while (await receive())["type"] != "http.disconnect":
                pass
            return

        answer = server.answers.get(path) or server.answers.get("any")
        if fault == "500":
            answer = (500, {})
        if answer is not None:
            # The body is read even so: an answer to a client that still sends would reset its connection.
            while (await receive()).get("more_body"):
                pass
            status, content = answer
            await JSONResponse(content, status)(scope, receive, send)
            return

        body = bytearray()
        is_whole = False

        async def receive_and_record():
            nonlocal is_whole
            message = await receive()
            body.extend(message.get("body", b""))
            is_whole = not message.get("more_body")
            return message

        async def send_and_record(message):
            # Some routes read no body, which the tests want to see all the same.
            if message["type"] == "http.response.start" and message["status"] == 200:
                while not is_whole:
                    await receive_and_record()
                server.requests.append(self.request(scope, bytes(body)))
            await send(message)

        await self.app(scope, receive_and_record, send_and_record)

    def request(self, scope, data):
        body = data or None
        # Some tests send what is no JSON.
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            body = json.loads(body)
        return (scope["method"], scope["path"], dict(parse_qsl(scope["query_string"].decode())), body)


def with_faults(application):
    """``application``, whose engines that belong to a :class:`FaultyServer` go wrong as it says."""

    def build(engine, key):
        app = application(engine, key)
        server = getattr(engine, "server", None)
        return app if server is None else Faults(app, server)

    return build


@pytest.fixture
def short_polls(monkeypatch):
    monkeypatch.setattr(pool, "FIRST_POLL_S", 0.05)
    monkeypatch.setattr(pool, "LONGEST_POLL_S", 0.2)
    monkeypatch.setattr(hf_server, "application", with_faults(hf_server.application))
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture
def policy():
    return loaded(llama(tied=True))


@pytest.fixture
def serve(policy, short_polls):
    started = []

    def start(served=None, **options):
        server = FaultyServer(served or copy.deepcopy(policy), **options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def connect(policy, tmp_path):
    """A backend on servers that run already."""
    built = []

    def build(*servers, backend="hf_server", batch_sequences=8, temperature=1.3, **options):
        config = RolloutConfig(backend=backend, batch_sequences=batch_sequences, temperature=temperature)
        config.options = {"urls": [server.url for server in servers], "start_timeout_s": 2, "request_timeout_s": 2}
        config.options |= options
        builders = {"hf_server": build_hf_server, "vllm_server": build_vllm_server}
        rollouts = builders[backend](config, loaded=policy)
        built.append(rollouts)
        rollouts.work_in(tmp_path)
        return rollouts

    yield build
    for rollouts in built:
        rollouts.close()


def draw(backend, prompts=(PROMPT,) * 8, *, group_size=3, seed=0, **changes):
    settings = {"temperature": 1.3, "max_new_tokens": 12} | changes
    return backend.generate(prompts, group_size=group_size, sampling=Sampling(**settings), seed=seed)


def move(model, size=0.3):
    """Add noise to every weight, as a large update would."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * weight.std() * torch.randn_like(weight))
