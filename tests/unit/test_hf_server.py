"""Our inference server: the draws of the ``hf`` backend, weights between tokens, and servers that die or hang."""

import json
import os
import signal
import threading
import time

import pytest
import torch
from faulty_servers import draw, move
from ranks import spawn
from test_engines_parts import PROMPT, llama, loaded
from test_models_sharding import config_of, save_tied

from forked_servers import ForkedServer
from kl_comedy.config.schema import LoraConfig, RolloutConfig
from kl_comedy.models import load_model
from kl_comedy.models.lora import add_lora
from kl_comedy.models.sharding import load_sharded
from kl_comedy.processes import ChildProcess, _group_exists
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts import build_hf, build_hf_server
from kl_comedy.rollouts.engines import servers as servers_module
from kl_comedy.rollouts.engines import transports

OTHER = Prompt(problem=Problem(id="2", text="9-", answer="9"), text="9-", token_ids=(11, 13))
PROMPTS = [PROMPT, OTHER, PROMPT] * 4

pytestmark = pytest.mark.usefixtures("short_polls")


def hf(policy, **config):
    return build_hf(RolloutConfig(batch_sequences=8, **config), loaded=policy)


@pytest.mark.parametrize("changes", [{"stop": ("8", "+1"), "top_k": 9}, {"temperature": 0.0}])
@pytest.mark.parametrize("loop", ["auto", "library"])
def test_the_completions_are_those_of_the_hf_backend_to_the_last_bit(policy, serve, connect, changes, loop):
    backend = connect(serve(use_library=loop == "library"))
    ours = hf(policy, options={"loop": loop})
    settings = {"group_size": 1 if "temperature" in changes else 4, **changes}
    for _ in range(2):
        assert draw(backend, PROMPTS, **settings) == draw(ours, PROMPTS, **settings)
        move(policy.model)
        backend.update_weights(7)
        ours.update_weights(7)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = draw(backend, PROMPTS, **settings)
        assert narrow == draw(ours, PROMPTS, **settings)
    assert narrow != draw(backend, PROMPTS, **settings)


def test_two_servers_share_a_batch(policy, serve, connect):
    backend = connect(serve(), serve(), batch_sequences=64)
    for row, expected in zip(draw(backend, PROMPTS), draw(hf(policy), PROMPTS), strict=True):
        assert row.completion_ids == expected.completion_ids
        assert row.logps == pytest.approx(expected.logps, abs=1e-5)


def test_an_adapter_arrives_merged(serve, connect, policy):
    object.__setattr__(policy, "model", add_lora(policy.model, LoraConfig(rank=2, target_modules=["q_proj"])))
    backend = connect(serve(loaded(llama(tied=True))))
    draw(backend)
    move(policy.model, size=1.0)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.add_(torch.randn_like(weight))
    backend.update_weights(1)
    rows, expected = draw(backend), draw(hf(policy))
    assert [row.logps[0] for row in rows] == pytest.approx([row.logps[0] for row in expected], abs=1e-4)


def test_weights_change_between_tokens_and_every_token_says_which(policy, serve, connect):
    backend = connect(serve(delay_s=0.02))
    draw(backend, max_new_tokens=2)
    rows = []
    thread = threading.Thread(target=lambda: rows.extend(draw(backend, [PROMPT] * 2, max_new_tokens=50)))
    thread.start()
    versions = []
    for version in (1, 2):
        time.sleep(0.2)
        move(policy.model)
        backend.publish(version)
        assert backend.version == version - 1, "an engine has not confirmed it yet"
        versions.append(backend.load())
    thread.join()
    assert versions == [1, 2]
    assert all(list(row.versions) == sorted(row.versions) for row in rows)
    assert {version for row in rows for version in row.versions} == {0, 1, 2}


def test_a_publication_that_fails_walks_the_weights_to_the_end(policy, connect, serve, monkeypatch):
    walked = []

    def weights(model, dtype):
        for number in range(5):
            walked.append(number)
            yield f"w{number}", torch.zeros(1)

    def fail(transport, loaded, weights, *rest):
        next(weights)
        raise OSError("No space left on device")

    backend = connect(serve())
    monkeypatch.setattr(transports, "full_weights", weights)
    monkeypatch.setattr(servers_module, "stage", fail)
    with pytest.raises(OSError, match="No space left"):
        backend.publish(1)
    assert walked == [0, 1, 2, 3, 4]
    follower = build_hf_server(RolloutConfig(), loaded=policy, leader=False)
    follower.publish(1)
    assert walked == [0, 1, 2, 3, 4] * 2
    assert not follower.processes()


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start_two(tmp_path_factory):
    """Two servers in processes of their own, forked or started by their command, each pair once."""
    started = {}

    def start(process_class):
        if process_class not in started:
            servers_module.ChildProcess = process_class
            policy, folder = loaded(llama(tied=True)), tmp_path_factory.mktemp("run")
            config = RolloutConfig(backend="hf_server", batch_sequences=6, temperature=1.3)
            config.options = {"servers": 2, "threads": 1, "request_timeout_s": 2}
            backend = started[process_class] = build_hf_server(config, loaded=policy)
            backend.work_in(folder)
            backend.update_weights(0)
        return started[process_class]

    yield start
    servers_module.ChildProcess = ChildProcess
    for backend in started.values():
        groups = [process.pid for process in backend.processes()]
        backend.close()
        assert sorted(path.name for path in backend._folder.iterdir()) == ["server-0.log", "server-1.log"]
        assert not any(map(_group_exists, groups))


@pytest.mark.parametrize(
    ("process_class", "number"),
    [
        (ForkedServer, signal.SIGKILL),
        (ForkedServer, signal.SIGSTOP),
        pytest.param(ChildProcess, signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_or_hangs_in_a_batch_costs_no_prompt_and_no_version(
    start_two, process_class, number, caplog
):
    servers = start_two(process_class)
    move(servers._loaded.model)
    version = servers.version + 1
    servers.update_weights(version)
    before = draw(servers, PROMPTS * 8)
    victim = servers.processes()[0].pid
    if process_class is ChildProcess:
        assert servers._key not in " ".join(psutil_words(victim))
    killer = threading.Timer(0.05, lambda: os.killpg(victim, number))
    killer.start()
    after = draw(servers, PROMPTS * 8)
    killer.join()
    assert [row.completion_ids for row in after] == [row.completion_ids for row in before]
    assert {version for row in after for version in row.versions} == {version}
    servers.update_weights(version + 1)
    assert servers.processes()[0].pid != victim
    assert "restarting it" in caplog.text
    assert {version for row in draw(servers) for version in row.versions} == {version + 1}


def psutil_words(pid):
    """The words of the commands of a process and of those that it started."""
    import psutil

    parent = psutil.Process(pid)
    return [word for each in (parent, *parent.children(recursive=True)) for word in each.cmdline()]


def update_from_shards(rank, world, folder, kind, transport):
    """What an engine draws after it took the weights of a sharded policy."""
    policy = load_sharded(config_of(kind, folder), limit_bytes=2**30)
    config = RolloutConfig(batch_sequences=8, temperature=1.3, options={"transport": transport})
    backend = build_hf_server(config, loaded=policy, leader=rank == 0)
    if rank == 0:
        backend.work_in(folder)
    move_evenly(policy.model)
    backend.update_weights(1)
    drawn = None
    if rank == 0:
        (written,) = [path for path in (folder / "sampler").iterdir() if path.is_dir()]
        config = json.loads((written / "config.json").read_text())
        ends = json.loads((written / "generation_config.json").read_text())["eos_token_id"]
        rows = draw(backend, [PROMPT] * 2)
        assert {version for row in rows for version in row.versions} == {1}
        assert any(written.glob("*.safetensors")) == (transport == "folder")
        drawn = [config["architectures"], ends, [(row.completion_ids, row.logps) for row in rows]]
    backend.close()
    return drawn


def move_evenly(model):
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.mul_(1.1).add_(0.01)


@pytest.mark.parametrize(
    ("kind", "transport"), [("tied lora", "gloo"), pytest.param("tied", "folder", marks=pytest.mark.slow)]
)
def test_an_engine_takes_the_weights_of_a_policy_in_shards(tmp_path, kind, transport):
    save_tied(tmp_path)
    (architectures, ends, rows), nothing = spawn(update_from_shards, tmp_path, kind, transport)
    assert nothing is None
    whole = load_model(config_of(kind, tmp_path))
    move_evenly(whole.model)
    expected = draw(hf(whole), [PROMPT] * 2)
    assert architectures == ["LlamaForCausalLM"]
    assert ends == [1, 5]
    assert [tuple(ids) for ids, _ in rows] == [row.completion_ids for row in expected]
    for (_, logps), row in zip(rows, expected, strict=True):
        assert logps == pytest.approx(row.logps, abs=1e-4)
