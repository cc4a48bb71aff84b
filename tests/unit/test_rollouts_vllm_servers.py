"""The client side of vLLM servers against a stand-in: who is refused, what is asked again, what a run survives."""

import asyncio
import copy
import itertools
import logging
import time

import pytest
import torch
from fake_vllm import FakeServer
from test_rollouts_vllm import PROMPT, llama, loaded

from kl_comedy.config.combinations import capabilities_of
from kl_comedy.config.schema import RolloutConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.rollouts import Sampling, build_vllm_server
from kl_comedy.rollouts.vllm import server as server_module
from kl_comedy.rollouts.vllm.auth import KEY_VARIABLE, RequireKey
from kl_comedy.rollouts.vllm.client import Refused, token_versions
from kl_comedy.rollouts.vllm.options import server_options
from kl_comedy.rollouts.vllm.server import Launch


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(server_module, "LONGEST_POLL_S", 0.2)


@pytest.fixture
def policy():
    return loaded(llama(tied=False))


@pytest.fixture
def fake(policy):
    started = []

    def start(**options):
        started.append(FakeServer(copy.deepcopy(policy.model), **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def connect(policy, tmp_path):
    built = []

    def build(*servers, temperature=1.0, **options):
        given = {"urls": [server.url for server in servers], "start_timeout_s": 2, "request_timeout_s": 2, **options}
        config = RolloutConfig(backend="vllm_server", batch_sequences=8, temperature=temperature, options=given)
        built.append(build_vllm_server(config, loaded=policy))
        built[-1].work_in(tmp_path)
        return built[-1]

    yield build
    for backend in built:
        backend.close()


def draw(backend, prompts=8, *, group_size=2, seed=0):
    settings = Sampling(temperature=1.0, max_new_tokens=5)
    return backend.generate([PROMPT] * prompts, group_size=group_size, sampling=settings, seed=seed)


def test_the_backend_declares_that_it_updates_between_tokens_and_needs_a_folder():
    capabilities = capabilities_of("vllm_server")
    assert capabilities.updates_between_tokens and capabilities.needs_folder and not capabilities.in_trainer_ranks


def test_versions_follow_updates_and_what_was_written_is_removed(fake, connect, policy, tmp_path):
    one, two = fake(), fake()
    backend = connect(one, two)
    assert {version for r in draw(backend) for version in r.versions} == {0}
    with torch.no_grad():
        policy.model.lm_head.weight.add_(torch.randn_like(policy.model.lm_head.weight))
    backend.update_weights(1)
    for server in (one, two):
        assert torch.equal(server.model.lm_head.weight, policy.model.lm_head.weight)
        assert server.label == "kl_comedy/1"
        begin = server.calls.index("/pause", server.calls.index("/pause") + 1)
        assert server.calls[begin : begin + 6] == [
            "/pause",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/resume",
            "/inference/v1/generate",
        ]
    assert {version for r in draw(backend) for version in r.versions} == {1}
    assert [path.name for path in (tmp_path / "sampler").iterdir()] == ["weights-00000001"]
    backend.close()
    assert not (tmp_path / "sampler").exists()


@pytest.mark.parametrize("accident", ["500", "drop", "hang"])
def test_an_accident_costs_no_prompt_and_changes_no_completion(fake, connect, accident, caplog):
    server = fake()
    backend = connect(server)
    before = draw(backend)
    server.accidents = [accident] * 2
    caplog.set_level(logging.WARNING)
    after = draw(backend)
    assert after == before
    assert [r.group_id for r in after] == [n // 2 for n in range(16)]
    assert caplog.text.count("restarting it") in (1, 2)


def test_a_dead_server_s_prompts_are_asked_elsewhere(fake, connect):
    one, two = fake(), fake()
    backend = connect(one, two, retries=1, start_timeout_s=1)
    before = draw(backend, 16)
    one.down = True
    begin = time.monotonic()
    assert draw(backend, 16) == before
    assert time.monotonic() - begin < 30
    one.down = False
    backend.update_weights(2)
    assert one.label == two.label == "kl_comedy/2", "a server that is well again takes part again"


def test_when_no_server_is_left_the_run_fails_and_says_why(fake, connect):
    server = fake()
    backend = connect(server, retries=1, start_timeout_s=1)
    draw(backend)
    server.accidents = ["down"]
    with pytest.raises(RunFailed, match=r"no vLLM server is left to sample from.*after 1 restarts"):
        draw(backend)


def test_a_server_that_was_given_other_weights_is_noticed(fake, connect):
    server = fake()
    backend = connect(server)
    draw(backend)
    server.label = "someone/else"
    with pytest.raises(RunFailed, match="weights that this run did not send"):
        draw(backend)


def test_the_probe_refuses_a_server_that_keeps_its_old_weights(fake, connect, policy, monkeypatch):
    server = fake()
    backend = connect(server)
    draw(backend)
    monkeypatch.setattr(server, "control", lambda path, body: (200, {"success": True}))
    with torch.no_grad():
        policy.model.lm_head.weight.add_(torch.randn_like(policy.model.lm_head.weight))
    with pytest.raises(RunFailed, match=r"does not have the trainer's weights after the update to version 3: .* nats"):
        backend.update_weights(3)


def test_a_server_of_another_model_is_refused(fake, connect, policy):
    other = fake()
    with torch.no_grad():
        other.model.model.embed_tokens.weight.mul_(3)
    with pytest.raises(UserError, match=r"urls: got .*a server of the model that is trained .*differ from the trainer"):
        connect(other)


def test_a_server_whose_vocabulary_is_smaller_is_refused(fake, connect, monkeypatch):
    """vLLM answers 400 to token ids that its model does not have."""
    other = fake()
    answer = (400, {"error": "Token id 31 is out of vocabulary"})
    route = other.route
    monkeypatch.setattr(other, "route", lambda path, body: answer if path.endswith("/generate") else route(path, body))
    with pytest.raises(
        UserError, match=r"the model that is trained .*'policy', which does not take tokens .*Token id 31"
    ):
        connect(other)


def test_a_server_left_by_a_run_of_another_model_is_refused_when_it_does_not_take_the_weights(fake, connect):
    """Its label is one of ours, so it is not asked for the trainer's log-probs before it gets the trainer's weights."""
    other = fake()
    other.label = "kl_comedy/7"
    other.model = llama(tied=False, layers=3)
    with pytest.raises(RunFailed, match=r"no vLLM server took the weights of version 0.*Missing key"):
        draw(connect(other, retries=1))


def test_a_server_with_log_probs_before_the_temperature_is_refused(fake, connect):
    server = fake(raw=True)
    with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
        connect(server, temperature=0.5)


def test_keys(fake, connect, monkeypatch):
    server = fake(key="right")
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


def test_what_is_no_vllm_server_is_refused(fake, connect, monkeypatch):
    server = fake(dev_mode=False)
    with pytest.raises(UserError, match="start it with VLLM_SERVER_DEV_MODE=1"):
        connect(server)
    stranger = fake()
    monkeypatch.setattr(stranger, "route", lambda path, body: (200, None))
    with pytest.raises(UserError, match=r"allowed: a vLLM server \(this is not one"):
        connect(stranger)
    monkeypatch.setattr(stranger, "route", lambda path, body: (200, {"hello": 1}))
    with pytest.raises(UserError, match="answers, but not as vLLM does"):
        connect(stranger)
    silent = fake()
    silent.down = True
    with pytest.raises(UserError, match="a running vLLM server"):
        connect(silent)


def test_servers_that_a_job_has_beside_the_trainer_are_used(fake, policy, monkeypatch):
    one, two = fake(), fake()
    monkeypatch.setenv("KL_COMEDY_SERVER_URLS", f"{one.url},{two.url}")
    backend = build_vllm_server(RolloutConfig(options={"servers": 2}), loaded=policy)
    assert draw(backend)
    backend.close()
    assert "/collective_rpc" in one.calls
    assert "/collective_rpc" in two.calls


def test_spans_must_cover_every_token():
    with pytest.raises(Refused, match="1 of 2 tokens"):
        token_versions([{"version": "kl_comedy/1", "start": 0, "end": 1}], 2)


@pytest.mark.parametrize(("given", "status"), [(b"Bearer k", 200), (b"Bearer K", 401), (b"", 401)])
def test_the_guard_lets_nothing_through_without_the_key(monkeypatch, given, status):
    monkeypatch.setenv(KEY_VARIABLE, "k")
    sent = []

    async def app(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/collective_rpc", "headers": [(b"authorization", given)] if given else []}
    asyncio.run(RequireKey(app)(scope, None, send))
    assert sent[0]["status"] == status
    sent.clear()
    asyncio.run(RequireKey(app)({**scope, "type": "websocket", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_the_command_line_shows_no_key_and_listens_on_loopback(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")
    options = server_options({"kv_cache_gib": 0.5, "enforce_eager": False, "tensor_parallel_size": 2, "gpus": ["0,1"]})
    launch = Launch(options=options, dtype="bfloat16", context=512, max_num_seqs=32, on_gpu=True)
    words = launch.arguments(tmp_path, 1234)
    assert {"--enable-scale-out", "--enable-prefix-caching"} <= set(words)
    settings = dict(itertools.pairwise(words))
    assert settings["--host"] == "127.0.0.1"
    assert settings["--kv-cache-memory-bytes"] == str(2**29)
    assert settings["--logprobs-mode"] == "processed_logprobs"
    assert "--enforce-eager" not in words
    environment = launch.environment("secret", "0,1")
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert [name for name, value in environment.items() if value == "secret"] == [KEY_VARIABLE]
    assert "VLLM_API_KEY" not in environment
    assert not any("secret" in word for word in words)
