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
from small_policies import versions_of


def test_the_backend_declares_that_it_updates_between_tokens_and_needs_a_folder():
    capabilities = capabilities_of("vllm_server")
    assert capabilities.updates_between_tokens
    assert capabilities.needs_folder
    assert not capabilities.in_trainer_ranks


UPDATE_CALLS = [
    "/pause",
    "/update_weight_version",  # the label of no version, until all weights are there
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/resume",
    "/weight_checker",
    GENERATE,  # the probe
]


def test_an_update_calls_each_server_in_order(serve, connect, policy):
    servers = [serve(), serve()]
    backend = connect(*servers, backend="vllm_server")
    draw(backend)
    for server in servers:
        server.calls.clear()
    move(policy.model)
    backend.update_weights(1)
    for server in servers:
        assert torch.equal(server.engine.loaded.model.lm_head.weight, policy.model.lm_head.weight)
        assert server.engine.label == f"kl_comedy/{backend._run}/1"
        # After questions about its health: is it there, and does it still draw from this run's weights?
        assert server.calls[server.calls.index("/pause") :] == UPDATE_CALLS


def test_versions_follow_updates_and_what_was_written_is_removed(serve, connect, policy, tmp_path):
    backend = connect(serve(), serve(), backend="vllm_server")
    assert versions_of(draw(backend)) == {0}
    move(policy.model)
    backend.update_weights(1)
    assert versions_of(draw(backend)) == {1}
    assert [path.name for path in (tmp_path / "sampler").iterdir()] == ["weights-00000001"]
    backend.close()
    assert not (tmp_path / "sampler").exists()


def test_vllms_client_asks_one_group_at_a_time_each_with_its_own_seed(serve, connect):
    servers = [serve(), serve()]
    backend = connect(*servers, backend="vllm_server")
    draw(backend)  # the first batch also probes the servers
    for server in servers:
        server.calls.clear()
    rows = draw(backend)
    asked = [server.calls.count(GENERATE) for server in servers]
    assert sum(asked) == 8, "one request per group"
    # Eight groups of the same prompt: with one seed for all there would be three completions.
    assert len({row.completion_ids for row in rows}) > 8


def test_each_server_is_probed_when_it_is_connected_and_after_each_update(serve, connect, policy):
    servers = [serve(), serve()]
    backend = connect(*servers, backend="vllm_server")
    draw(backend)
    backend.update_weights(1)
    draw(backend)
    probes_at_the_start = 2 * 2  # before and after each server took the first weights
    probes_of_the_update = 2
    requests_of_two_batches = 2 * 8
    asked = [server.calls.count(GENERATE) for server in servers]
    assert sum(asked) == probes_at_the_start + probes_of_the_update + requests_of_two_batches


@pytest.mark.parametrize("fault", ["500", "drop", "hang"])
def test_a_fault_costs_no_prompt_and_changes_no_completion(serve, connect, fault, caplog):
    server = serve()
    backend = connect(server, backend="vllm_server", request_timeout_s=1)
    before = draw(backend)
    server.faults = [fault] * 2
    caplog.set_level(logging.WARNING)
    after = draw(backend)
    assert after == before
    assert [row.group_id for row in after] == [number // 3 for number in range(24)], "eight groups of three, in order"
    # Once where both faults hit requests that were on their way together, twice otherwise.
    assert caplog.text.count("restarting it") in (1, 2)


def test_the_prompts_of_a_dead_server_are_asked_elsewhere(serve, connect):
    dead = serve()
    well = serve()
    backend = connect(dead, well, backend="vllm_server", retries=1, start_timeout_s=1)
    before = draw(backend)
    dead.down = True
    # Far less than the prompts times the limit of a request: a dead server is given up once, not for each prompt.
    begin = time.monotonic()
    assert draw(backend) == before
    assert time.monotonic() - begin < 30
    dead.down = False
    backend.update_weights(2)
    assert dead.engine.label == well.engine.label, "a server that is well again takes part again"
    assert well.engine.label.endswith("/2")


def test_a_server_may_fail_again_in_each_batch(serve, connect):
    """``retries`` counts per batch: a run of many batches outlives a server that fails once in each."""
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
    first = connect(server)
    second = connect(server)
    draw(first)
    draw(second)
    with pytest.raises(UserError, match=r"urls: got .*weights that this run did not send .*another run updates it"):
        draw(first)
    assert draw(second)


def test_a_completion_some_of_whose_tokens_have_no_version_is_refused():
    with pytest.raises(Refused, match="1 of 2 tokens"):
        token_versions([{"version": "kl_comedy/a/1", "start": 0, "end": 1}], 2, "kl_comedy/a/")


@pytest.fixture
def deaf_backend(serve, connect, monkeypatch):
    """A backend whose server reports success without reading the weights that it is sent."""
    backend = connect(serve(), retries=0)
    draw(backend)
    monkeypatch.setattr(hf_server.Engine, "reload", lambda self, folder: None)
    return backend


AFTER_UPDATE_3 = "the trainer's weights after the update to version 3: "


def test_a_server_that_did_not_take_its_weights_is_noticed_by_their_checksums(deaf_backend, policy):
    with torch.no_grad():
        policy.model.lm_head.weight[3, 4] += 1e-7
    with pytest.raises(RunFailed, match=AFTER_UPDATE_3 + r"[\d]+ of \d+ checksums differ: lm_head"):
        deaf_backend.update_weights(3)


def test_a_server_that_did_not_take_its_weights_is_noticed_by_the_probe(deaf_backend, policy, monkeypatch):
    """As where no checksum can be compared: an engine that quantizes."""
    monkeypatch.setattr(pool, "checksum_complaint", lambda *arguments: None)
    move(policy.model, size=1.0)
    with pytest.raises(RunFailed, match=AFTER_UPDATE_3 + "log-probs of the probe"):
        deaf_backend.update_weights(3)


def test_a_transfer_that_breaks_leaves_a_server_that_answers_and_takes_the_weights_of_the_next_run(
    serve, connect, policy, monkeypatch
):
    """Its weights are no version of any run until all of them are there; also where a request to resume is lost."""
    server = serve()
    first = connect(server, retries=0)
    draw(first)
    move(policy.model)
    client = first._servers[0].client
    request = client._request
    requests_to_lose = ["/resume", "/update_weight_version"]
    labels_while_sending = []

    def send_and_break(self, weights, peer):
        labels_while_sending.append(server.engine.label)
        server.engine.reload(weights.folder)
        client._request = lose_requests
        raise OSError

    def lose_requests(method, path, **content):
        if path in requests_to_lose:
            requests_to_lose.remove(path)
            raise ServerTrouble("lost")
        return request(method, path, **content)

    with monkeypatch.context() as patch:
        patch.setattr(FolderTransport, "send", send_and_break)
        with pytest.raises(RunFailed, match=r"no inference server took .* the transfer of weights failed: OSError"):
            first.update_weights(1)
    label_of_no_version = f"kl_comedy/{first._run}/-1"
    assert labels_while_sending == [label_of_no_version]
    assert server.engine.label == label_of_no_version
    assert not requests_to_lose, "both requests were made again"
    assert not server.engine._paused
    second = connect(server)
    assert versions_of(draw(second)) == {0}


@pytest.fixture
def other_server(serve):
    """A server of a model with one layer more than the policy's."""
    return serve(loaded(llama(tied=True, layers=3)))


def test_a_server_of_another_model_is_refused_by_its_log_probs(other_server, connect):
    with pytest.raises(UserError, match=r"urls: got .*the model that is trained .*log-probs of the probe differ"):
        connect(other_server)


@pytest.mark.parametrize("transport", ["folder", "gloo"])
def test_a_server_of_another_model_with_a_label_of_ours_is_refused_when_it_takes_no_weights(
    other_server, connect, transport
):
    """Its log-probs may differ: an earlier run has trained it."""
    other_server.engine.set_label("kl_comedy/7")
    backend = connect(other_server, retries=1)
    backend._servers[0]._transport = TRANSPORTS[transport](torch.device("cpu"))
    with pytest.raises(UserError, match=r"urls: got .*did not take the weights of version 0.*of another model"):
        draw(backend)
    assert not other_server.engine._paused, "other clients get answers again"
    assert other_server.engine.label == f"kl_comedy/{backend._run}/-1"


def test_a_server_of_a_smaller_vocabulary_is_refused(serve, connect):
    small = llama(tied=True)
    small.resize_token_embeddings(8)
    with pytest.raises(UserError, match=r"the model that is trained .*refuses the probe.s tokens: .*Token id 1"):
        connect(serve(loaded(small)))


def test_a_server_with_log_probs_before_the_temperature_is_refused(serve, connect):
    server = serve()
    probe = server.engine.probe
    server.engine.probe = lambda ids, fields: probe(ids, {**fields, "temperature": 1.0})
    with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
        connect(server, temperature=0.5)


def test_without_a_key_the_error_names_its_variable(serve, connect, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(UserError, match=r"it refuses an empty API key: there is none in .* VLLM_API_KEY"):
        connect(serve(key="the-right-key-of-it"))


def test_a_wrong_key_is_not_shown(serve, connect, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "wrong-key")
    with pytest.raises(UserError, match="it refuses the API key in") as caught:
        connect(serve(key="the-right-key-of-it"))
    assert "wrong-key" not in str(caught.value)


def test_the_right_key_is_accepted(serve, connect, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "the-right-key-of-it")
    assert draw(connect(serve(key="the-right-key-of-it")))


def test_a_key_file_that_does_not_exist_is_refused(serve, connect):
    with pytest.raises(UserError, match="api_key_file: got '/no/such'; allowed: a file that holds the API key"):
        connect(serve(), api_key_file="/no/such")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/weight_info": (404, {"detail": "Not Found"})}, "start it with VLLM_SERVER_DEV_MODE=1"),
        ({"any": (200, {"hello": 1})}, "answers, but not as vLLM does"),
        ({"any": (300, {})}, r"allowed: a transformers server \(this is not one"),
        ({"any": (500, {})}, "a running transformers server"),
    ],
    ids=["vLLM without its development mode", "another service", "a redirection", "an error"],
)
def test_what_is_no_vllm_server_is_refused(serve, connect, answers, message):
    server = serve()
    server.answers = answers
    with pytest.raises(UserError, match=message):
        connect(server)


def test_a_server_that_drops_every_connection_is_refused(serve, connect):
    server = serve()
    server.down = True
    with pytest.raises(UserError, match="a running transformers server"):
        connect(server)


def test_requests_that_do_not_fit_are_refused(serve, connect):
    """The server has 64 positions, 4 of them for the prompt, whatever the trainer's config says."""
    backend = connect(serve())
    backend._loaded.model.config.max_position_embeddings = 10**6
    with pytest.raises(UserError, match="max_new_tokens: got 100; allowed: up to 60"):
        draw(backend, max_new_tokens=100)


def test_a_server_has_a_thread_at_least(policy):
    with pytest.raises(UserError, match=r"options\.threads: got 0"):
        build_hf_server(RolloutConfig(options={"threads": 0}), loaded=policy)


def test_servers_that_a_job_has_beside_the_trainer_are_used(serve, policy, monkeypatch):
    servers = [serve(), serve()]
    monkeypatch.setenv("KL_COMEDY_SERVER_URLS", ",".join(server.url for server in servers))
    backend = build_vllm_server(RolloutConfig(options={"servers": 2}), loaded=policy)
    assert draw(backend)
    backend.close()
    for server in servers:
        assert "/collective_rpc" in server.calls


LONG_KEY = "k" * MIN_KEY_CHARACTERS


async def answer_200(scope, receive, send):
    """The application behind the guard."""
    await send({"status": 200})


def guarded_answer(kind, authorization):
    """The first message that the guard sends in answer to a request of this ``kind`` and header."""
    sent = []

    async def send(message):
        sent.append(message)

    guard = RequireKey(answer_200)
    asyncio.run(guard({"type": kind, "headers": [(b"authorization", authorization)]}, None, send))
    return sent[0]


def test_the_guard_lets_the_key_through(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, LONG_KEY)
    authorization = f"Bearer {LONG_KEY}".encode()
    assert guarded_answer("http", authorization)["status"] == 200
    assert guarded_answer("websocket", authorization) == {"status": 200}


@pytest.mark.parametrize("authorization", [f"Bearer {LONG_KEY.upper()}".encode(), b""], ids=["another key", "none"])
def test_the_guard_lets_nothing_through_without_the_key(monkeypatch, authorization):
    monkeypatch.setenv(KEY_VARIABLE, LONG_KEY)
    answer = guarded_answer("http", authorization)
    assert answer["status"] == 401
    # Without it uvicorn reads, and throws away, whatever body the stranger sends.
    assert (b"connection", b"close") in answer["headers"]
    assert guarded_answer("websocket", authorization) == {"type": "websocket.close", "code": 1008}


@pytest.mark.parametrize("key", ["", "k", LONG_KEY[:-1]], ids=["empty", "one letter", "one letter too few"])
def test_the_guard_refuses_to_start_with_a_short_key(monkeypatch, key):
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ValueError, match="KL_COMEDY_SERVER_KEY must hold"):
        RequireKey(answer_200)


@pytest.fixture
def vllm_servers(policy):
    raw = {"kv_cache_gib": 0.5, "enforce_eager": False, "tensor_parallel_size": 2, "gpus": ["0,1"], "dtype": "bfloat16"}
    return VLLMServers(RolloutConfig(batch_sequences=32), engine_options(VLLMServerOptions, raw), policy)


def test_the_command_line_listens_on_loopback_and_shows_no_key(tmp_path, vllm_servers):
    words = vllm_servers.command(tmp_path, 1234, FolderTransport())
    assert "--api-key" not in words, "the key goes by the environment"
    settings = dict(itertools.pairwise(words))
    expected = {
        "--host": "127.0.0.1",
        "--port": "1234",
        "--max-num-seqs": "32",
        "--kv-cache-memory-bytes": str(2**29),
        "--logprobs-mode": "processed_logprobs",
        "--max-model-len": "64",
        "--dtype": "bfloat16",
    }
    assert {name: settings[name] for name in expected} == expected
    assert "--enable-scale-out" in words
    assert "--enable-prefix-caching" in words
    assert "--enforce-eager" not in words
    module, _, name = settings["--middleware"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is RequireKey


def test_vllm_loads_the_folder_or_waits_for_weights_by_tcp(tmp_path, vllm_servers):
    words = vllm_servers.command(tmp_path, 1234, FolderTransport())
    assert "--load-format" not in words
    assert "--weight-transfer-config" not in words
    settings = dict(itertools.pairwise(vllm_servers.command(tmp_path, 1234, SocketTransport())))
    assert settings["--load-format"] == "dummy"
    assert settings["--weight-transfer-config"] == '{"backend": "kl_gloo"}'
    assert IPCTransport(torch.device("cpu")).environment == {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def test_a_server_of_the_run_does_not_get_the_users_key(vllm_servers, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")
    environment = vllm_servers.environment()
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "of-another-server" not in environment.values()
