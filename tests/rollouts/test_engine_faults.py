"""Servers named by address: who is refused, what is asked again, what a run survives; and how vLLM's are started."""

import asyncio
import importlib
import itertools
import logging
import time

import pytest
import torch

from engine_policies import llama, loaded
from faulty_servers import draw, move
from kl_comedy.config.schema import RolloutConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.rollouts import build_hf_server, build_vllm_server
from kl_comedy.rollouts.engines import hf_server, pool
from kl_comedy.rollouts.engines.client import GENERATE, MIN_KEY_CHARACTERS, Refused, ServerTrouble, token_versions
from kl_comedy.rollouts.engines.options import KEY_VARIABLE, VLLMServerOptions, engine_options
from kl_comedy.rollouts.engines.transports import TRANSPORTS, FolderTransport, IPCTransport, SocketTransport
from kl_comedy.rollouts.engines.vllm import RequireKey, VLLMServers
from kl_comedy.rollouts.sampler import capabilities_of


def test_the_backend_declares_that_it_updates_between_tokens_and_needs_a_folder():
    capabilities = capabilities_of("vllm_server")
    assert capabilities.updates_between_tokens and capabilities.needs_folder and not capabilities.in_trainer_ranks


def test_versions_follow_updates_and_what_was_written_is_removed(serve, connect, policy, tmp_path):
    """vLLM's client asks one group at a time, each with its own seed."""
    servers = serve(), serve()
    backend = connect(*servers, backend="vllm_server")
    assert {version for row in draw(backend) for version in row.versions} == {0}
    move(policy.model)
    backend.update_weights(1)
    named = "/update_weight_version"
    order = ["/pause", named, "/collective_rpc", "/reset_prefix_cache", named, "/resume", "/weight_checker"]
    for server in servers:
        assert torch.equal(server.engine.loaded.model.lm_head.weight, policy.model.lm_head.weight)
        assert server.engine.label == f"kl_comedy/{backend._run}/1"
        begin = server.calls.index("/pause", server.calls.index("/pause") + 1)
        assert server.calls[begin:] == [*order, GENERATE]
    rows = draw(backend)
    assert {version for row in rows for version in row.versions} == {1}
    assert len({row.completion_ids for row in rows}) > 8
    assert sum(server.calls.count(GENERATE) for server in servers) == 4 + 2 * 8 + 2
    assert [path.name for path in (tmp_path / "sampler").iterdir()] == ["weights-00000001"]
    backend.close()
    assert not (tmp_path / "sampler").exists()


@pytest.mark.parametrize("fault", ["500", "drop", "hang"])
def test_a_fault_costs_no_prompt_and_changes_no_completion(serve, connect, fault, caplog):
    server = serve()
    backend = connect(server, backend="vllm_server", request_timeout_s=1)
    before = draw(backend)
    server.faults = [fault] * 2
    caplog.set_level(logging.WARNING)
    after = draw(backend)
    assert after == before
    assert [row.group_id for row in after] == [n // 3 for n in range(24)]
    assert caplog.text.count("restarting it") in (1, 2)


def test_the_prompts_of_a_dead_server_are_asked_elsewhere(serve, connect):
    dead, well = serve(), serve()
    backend = connect(dead, well, backend="vllm_server", retries=1, start_timeout_s=1)
    before = draw(backend)
    dead.down = True
    begin = time.monotonic()
    assert draw(backend) == before
    assert time.monotonic() - begin < 30
    dead.down = False
    backend.update_weights(2)
    assert dead.engine.label == well.engine.label, "a server that is well again takes part again"
    assert well.engine.label.endswith("/2")


def test_a_server_may_fail_again_in_each_batch(serve, connect):
    """``retries`` is of a batch: a run of many batches outlives a server that fails once in each."""
    server = serve()
    backend = connect(server, backend="vllm_server", retries=1)
    before = draw(backend)
    for _ in range(3):
        server.faults = ["500"]
        assert draw(backend) == before
    assert backend.restarts == 3


def test_when_no_server_is_left_the_run_fails_and_says_why(serve, connect):
    server = serve()
    backend = connect(server, retries=1, start_timeout_s=1)
    draw(backend)
    server.faults = ["down"]
    with pytest.raises(RunFailed, match=r"no inference server is left to sample from.*after 1 restarts"):
        draw(backend)


@pytest.mark.parametrize("label", ["kl_comedy/{}/0", "default"])
def test_a_server_that_went_back_to_older_weights_gets_the_new_ones(serve, connect, caplog, label):
    server = serve()
    backend = connect(server)
    backend.update_weights(1)
    before = draw(backend)
    server.engine.set_label(label.format(backend._run))
    assert draw(backend) == before
    assert "it draws from weights older than version 1; restarting it" in caplog.text
    assert backend.restarts == 1


def test_two_runs_that_update_one_server_are_told_apart(serve, connect):
    """The run whose weights were replaced ends; it never takes tokens of the other's for its own."""
    server = serve()
    first, second = connect(server), connect(server)
    draw(first)
    draw(second)
    with pytest.raises(UserError, match=r"urls: got .*weights that this run did not send .*another run updates it"):
        draw(first)
    assert draw(second)
    with pytest.raises(Refused, match="1 of 2 tokens"):
        token_versions([{"version": "kl_comedy/a/1", "start": 0, "end": 1}], 2, "kl_comedy/a/")


@pytest.mark.parametrize("message", [r"[\d]+ of \d+ checksums differ: lm_head", "log-probs of the probe"])
def test_a_server_that_did_not_take_its_weights_is_noticed(serve, connect, policy, monkeypatch, message):
    backend = connect(serve(), retries=0)
    draw(backend)
    monkeypatch.setattr(hf_server.Engine, "reload", lambda self, folder: None)
    if "probe" in message:
        monkeypatch.setattr(pool, "checksum_complaint", lambda *arguments: None)
        move(policy.model, size=1.0)
    else:
        with torch.no_grad():
            policy.model.lm_head.weight[3, 4] += 1e-7
    with pytest.raises(RunFailed, match=rf"the trainer's weights after the update to version 3: {message}"):
        backend.update_weights(3)


def test_a_transfer_that_breaks_leaves_a_server_that_answers_and_takes_the_weights_of_the_next_run(
    serve, connect, policy, monkeypatch
):
    """Its weights are no version of any run until all of them are there; also where a request to resume is lost."""
    server = serve()
    first = connect(server, retries=0)
    draw(first)
    move(policy.model)
    client = first._servers[0].client
    request, lost, labels = client._request, ["/resume", "/update_weight_version"], []

    def send(self, weights, peer):
        labels.append(server.engine.label)
        server.engine.reload(weights.folder)
        client._request = lossy
        raise OSError

    def lossy(method, path, **content):
        if path in lost:
            lost.remove(path)
            raise ServerTrouble("lost")
        return request(method, path, **content)

    with monkeypatch.context() as patch:
        patch.setattr(FolderTransport, "send", send)
        with pytest.raises(RunFailed, match=r"no inference server took .* the transfer of weights failed: OSError"):
            first.update_weights(1)
    assert labels == [server.engine.label] == [f"kl_comedy/{first._run}/-1"]
    assert not lost and not server.engine._paused
    second = connect(server)
    assert {version for row in draw(second) for version in row.versions} == {0}


def test_a_server_of_another_model_is_refused(serve, connect, policy):
    """By its log-probs; where its label is one of ours, when it does not take the trainer's weights."""
    other = serve(loaded(llama(tied=True, layers=3)))
    with pytest.raises(UserError, match=r"urls: got .*the model that is trained .*log-probs of the probe differ"):
        connect(other)
    other.engine.set_label("kl_comedy/7")
    for transport in ("folder", "gloo"):
        backend = connect(other, retries=1)
        backend._servers[0]._transport = pool_transport(transport)
        with pytest.raises(UserError, match=r"urls: got .*did not take the weights of version 0.*of another model"):
            draw(backend)
        assert not other.engine._paused, "other clients get answers again"
        assert other.engine.label == f"kl_comedy/{backend._run}/-1"
        other.engine.set_label("kl_comedy/7")
    small = llama(tied=True)
    small.resize_token_embeddings(8)
    with pytest.raises(UserError, match=r"the model that is trained .*refuses the probe.s tokens: .*Token id 1"):
        connect(serve(loaded(small)))


def pool_transport(name):
    return TRANSPORTS[name](torch.device("cpu"))


def test_a_server_with_log_probs_before_the_temperature_is_refused(serve, connect):
    server = serve()
    probe = server.engine.probe
    server.engine.probe = lambda ids, fields: probe(ids, {**fields, "temperature": 1.0})
    with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
        connect(server, temperature=0.5)


def test_keys(serve, connect, monkeypatch):
    server = serve(key="right")
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(UserError, match=r"it refuses an empty API key: there is none in .* VLLM_API_KEY"):
        connect(server)
    monkeypatch.setenv("VLLM_API_KEY", "wrong-key")
    with pytest.raises(UserError, match="it refuses the API key in") as caught:
        connect(server)
    assert "wrong-key" not in str(caught.value)
    monkeypatch.setenv("VLLM_API_KEY", "right")
    assert draw(connect(server))
    with pytest.raises(UserError, match="api_key_file: got '/no/such'; allowed: a file that holds the API key"):
        connect(server, api_key_file="/no/such")


def test_what_is_no_vllm_server_is_refused(serve, connect):
    server = serve()
    for answers, message in (
        ({"/weight_info": (404, {"detail": "Not Found"})}, "start it with VLLM_SERVER_DEV_MODE=1"),
        ({"any": (200, {"hello": 1})}, "answers, but not as vLLM does"),
        ({"any": (300, {})}, r"allowed: a transformers server \(this is not one"),
        ({"any": (500, {})}, "a running transformers server"),
    ):
        server.answers = answers
        with pytest.raises(UserError, match=message):
            connect(server)
    server.down = True
    with pytest.raises(UserError, match="a running transformers server"):
        connect(server)


def test_requests_that_do_not_fit_are_refused(serve, connect, policy):
    backend = connect(serve())
    backend._loaded.model.config.max_position_embeddings = 10**6
    with pytest.raises(UserError, match="max_new_tokens: got 100; allowed: up to 60"):
        draw(backend, max_new_tokens=100)
    with pytest.raises(UserError, match=r"options\.threads: got 0"):
        build_hf_server(RolloutConfig(options={"threads": 0}), loaded=policy)


def test_servers_that_a_job_has_beside_the_trainer_are_used(serve, policy, monkeypatch):
    servers = serve(), serve()
    monkeypatch.setenv("KL_COMEDY_SERVER_URLS", ",".join(server.url for server in servers))
    backend = build_vllm_server(RolloutConfig(options={"servers": 2}), loaded=policy)
    assert draw(backend)
    backend.close()
    assert all("/collective_rpc" in server.calls for server in servers)


LONG_KEY = "k" * MIN_KEY_CHARACTERS


@pytest.mark.parametrize(("given", "status"), [(LONG_KEY, 200), (LONG_KEY.upper(), 401), (None, 401)])
def test_the_guard_lets_nothing_through_without_the_key(monkeypatch, given, status):
    monkeypatch.setenv(KEY_VARIABLE, LONG_KEY)
    given = b"" if given is None else f"Bearer {given}".encode()
    sent = []

    async def app(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        sent.append(message)

    for short in ("", "k", LONG_KEY[:-1]):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="KL_COMEDY_SERVER_KEY must hold"):
            patch.setenv(KEY_VARIABLE, short)
            RequireKey(app)
    guard = RequireKey(app)
    asyncio.run(guard({"type": "http", "headers": [(b"authorization", given)]}, None, send))
    assert sent[0]["status"] == status
    if status == 401:  # else uvicorn reads, and throws away, whatever body the stranger sends
        assert (b"connection", b"close") in sent[0]["headers"]
    sent.clear()
    asyncio.run(guard({"type": "websocket", "headers": [(b"authorization", given)]}, None, send))
    assert sent[0] == ({"status": 200} if status == 200 else {"type": "websocket.close", "code": 1008})


def test_the_command_line_listens_on_loopback_and_shows_no_key(tmp_path, policy, monkeypatch):
    raw = {"kv_cache_gib": 0.5, "enforce_eager": False, "tensor_parallel_size": 2, "gpus": ["0,1"], "dtype": "bfloat16"}
    servers = VLLMServers(RolloutConfig(batch_sequences=32), engine_options(VLLMServerOptions, raw), policy)
    words = servers.command(tmp_path, 1234, FolderTransport())
    assert {"--enable-scale-out", "--enable-prefix-caching"} <= set(words)
    settings = dict(itertools.pairwise(words))
    assert (settings["--host"], settings["--port"], settings["--max-num-seqs"]) == ("127.0.0.1", "1234", "32")
    assert settings["--kv-cache-memory-bytes"] == str(2**29)
    assert settings["--logprobs-mode"] == "processed_logprobs"
    assert (settings["--max-model-len"], settings["--dtype"]) == ("64", "bfloat16")
    assert "--enforce-eager" not in words
    module, _, name = settings["--middleware"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is RequireKey
    assert "--load-format" not in words and "--weight-transfer-config" not in words
    settings = dict(itertools.pairwise(servers.command(tmp_path, 1234, SocketTransport())))
    assert settings["--load-format"] == "dummy"
    assert settings["--weight-transfer-config"] == '{"backend": "kl_gloo"}'
    assert IPCTransport(torch.device("cpu")).environment == {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")
    environment = servers.environment()
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "of-another-server" not in environment.values()
