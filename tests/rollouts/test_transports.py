"""How weights reach engines: which transport a run takes, each weight once, the adapter alone, faults in a transfer."""

import contextlib
import dataclasses
import json
import os
import socket
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from engine_policies import PROMPT, llama
from faulty_servers import draw, move
from forked_servers import ForkedServer
from kl_comedy.config.schema import LoraConfig, RolloutConfig
from kl_comedy.errors import UserError
from kl_comedy.models import weights as model_weights
from kl_comedy.models.lora import add_lora
from kl_comedy.models.weights import Checksums, adapter_weights, full_weights
from kl_comedy.rollouts import build_hf, build_hf_server, build_vllm_server
from kl_comedy.rollouts.engines import servers as servers_module
from kl_comedy.rollouts.engines import transports
from kl_comedy.rollouts.engines.options import (
    TRANSPORT_RULES,
    HFServerOptions,
    VLLMServerOptions,
    server_gpus,
    transport_of,
)
from kl_comedy.rollouts.engines.transports import TRANSPORTS, AdapterTransport, stage
from kl_comedy.rollouts.engines.weights import checksum_complaint

pytestmark = pytest.mark.usefixtures("short_polls")

URLS = ("http://a:1",)
CHOICES = [
    (HFServerOptions(), False, [], "gloo"),
    (HFServerOptions(), True, ["0"], "gloo"),
    (HFServerOptions(urls=URLS), False, [], "folder"),
    (VLLMServerOptions(), False, [], "gloo"),
    (VLLMServerOptions(urls=URLS), True, ["0"], "folder"),
    (VLLMServerOptions(urls=URLS, transport="nccl"), False, ["0"], "nccl"),
    (VLLMServerOptions(), True, [], "adapter"),
    (VLLMServerOptions(transport="gloo"), True, [], "gloo"),
    (VLLMServerOptions(), False, ["0"], "ipc"),
    (VLLMServerOptions(gpus=("1",)), False, ["0", "1"], "nccl"),
    (VLLMServerOptions(servers=2), False, ["0", "1"], "gloo"),
    (VLLMServerOptions(servers=2, gpus=("2,3", "4,5"), tensor_parallel_size=2), False, list("012345"), "nccl"),
]
REFUSED = [
    (VLLMServerOptions(transport="nccl"), [], "nccl'; allowed: auto, folder, gloo .it moves weights between GPUs, and"),
    (VLLMServerOptions(transport="ipc"), [], "ipc'; allowed: auto, folder, gloo .it moves weights between GPUs, and"),
    (HFServerOptions(transport="nccl"), ["0"], "it is vLLM's own"),
    (VLLMServerOptions(transport="nccl"), ["0"], "NCCL cannot group two processes on one GPU, and GPU 0 has rank 0"),
    (VLLMServerOptions(transport="ipc", gpus=("1",)), ["0", "1"], "started by the run on that of rank 0, 0"),
    (VLLMServerOptions(transport="adapter"), [], "a LoRA adapter alone is for vLLM servers that the run starts"),
    (HFServerOptions(transport="adapter"), [], "a LoRA adapter alone is for vLLM servers"),
    (
        VLLMServerOptions(servers=3),
        ["0", "1"],
        r"servers: got 3; allowed: at most 2 \(each needs 1 of this machine's 2",
    ),
    (
        VLLMServerOptions(gpus=("0", "1", "2"), servers=3),
        ["0", "1"],
        r"gpus: got '2'; .*this machine's 2 GPUs \(0, 1\)",
    ),
    (VLLMServerOptions(gpus=("0",), tensor_parallel_size=2), ["0", "1"], "each server needs 2 of this machine's 2"),
]


@pytest.mark.parametrize(("options", "lora", "gpus", "expected"), CHOICES)
def test_the_transport_is_chosen_by_what_is_there(monkeypatch, options, lora, gpus, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert transport_of(options, lora=lora, gpus=gpus) == expected


JOBS = [
    (VLLMServerOptions(urls=URLS), True, "1", "adapter"),
    (VLLMServerOptions(urls=URLS, transport="adapter"), True, "1", "adapter"),
    (VLLMServerOptions(urls=URLS), False, "1", "folder"),
    (VLLMServerOptions(urls=URLS, transport="gloo"), True, "1", "gloo"),
    (HFServerOptions(urls=URLS), True, "1", "folder"),
    (VLLMServerOptions(urls=URLS), True, None, "folder"),  # a command of the profile's own
    (VLLMServerOptions(urls=("http://b:1",)), True, "1", "folder"),  # others, which the config names
]


@pytest.mark.parametrize(("options", "lora", "by_config", "expected"), JOBS)
def test_servers_that_a_job_starts_by_the_config_get_an_adapter_alone(monkeypatch, options, lora, by_config, expected):
    monkeypatch.setenv("KL_COMEDY_SERVER_URLS", ",".join(URLS))
    if by_config:
        monkeypatch.setenv("KL_COMEDY_SERVERS_BY_CONFIG", by_config)
    assert transport_of(options, lora=lora, gpus=[]) == expected


@pytest.mark.parametrize(("options", "gpus", "message"), REFUSED)
def test_what_cannot_work_is_refused_in_one_line(monkeypatch, options, gpus, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=message) as caught:
        transport_of(options, lora=False, gpus=gpus)
    assert "\n" not in str(caught.value)


RULES = {
    "adapter_cannot_be_sent": (VLLMServerOptions(transport="adapter"), []),
    "policy_is_on_cpu": (VLLMServerOptions(transport="ipc"), []),
    "server_is_not_vllm": (HFServerOptions(transport="nccl"), ["0"]),
    "server_shares_gpu_of_rank_0": (VLLMServerOptions(transport="nccl"), ["0"]),
    "server_is_not_on_gpu_of_rank_0": (VLLMServerOptions(transport="ipc", urls=URLS), ["0"]),
}


@pytest.mark.parametrize("rule", TRANSPORT_RULES, ids=lambda rule: rule.name)
def test_each_rule_against_a_transport_is_met_by_its_example(rule):
    options, gpus = RULES[rule.name]
    assert options.transport in rule.transports
    with pytest.raises(UserError) as caught:
        transport_of(options, lora=False, gpus=gpus)
    assert rule.message.partition("{")[0] in str(caught.value)


def test_every_server_has_gpus_of_its_own():
    assert server_gpus(VLLMServerOptions(servers=2, tensor_parallel_size=2), list("0123")) == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize("adapted", [False, True])
def test_a_tied_weight_is_gathered_once_and_comes_under_both_names(monkeypatch, adapted):
    model = llama(tied=True)
    model = add_lora(model, LoraConfig(rank=2, target_modules=["q_proj"])) if adapted else model
    gathered = []
    monkeypatch.setattr(model_weights, "full_tensor", lambda tensor: gathered.append(tensor) or tensor.detach())
    stream = list(full_weights(model, torch.bfloat16))
    tied = [tensor for name, tensor in stream if name in ("lm_head.weight", "model.embed_tokens.weight")]
    assert len(tied) == 2 and tied[0] is tied[1]
    base = llama(tied=True)
    merged = len(list(base.parameters()))  # whole already when they are cast
    assert len(gathered) == len(list(model.parameters())) + (merged if adapted else 0)
    assert {name for name, _ in stream} == set(base.state_dict())


def with_adapter(policy, targets=("q_proj", "k_proj", "down_proj")):
    model = add_lora(policy.model, LoraConfig(rank=2, alpha=3, target_modules=list(targets)))
    object.__setattr__(policy, "model", model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    return policy


def test_base_and_adapter_make_the_merged_weights(policy):
    merged = dict(full_weights(with_adapter(policy).model))
    base, factors = dict(full_weights(policy.model, adapter=False)), dict(adapter_weights(policy.model))
    assert set(base) == set(merged) and len(factors) == 2 * 3 * 2
    for module in {name.rpartition(".")[0] for name in factors}:
        base[f"{module}.weight"] = base[f"{module}.weight"] + factors[f"{module}.lora_B"] @ factors[f"{module}.lora_A"]
    for name, tensor in merged.items():
        torch.testing.assert_close(base[name], tensor, msg=name)


def test_an_adapter_is_staged_alone_beside_links_to_the_base(policy, tmp_path):
    transport, staged = AdapterTransport(), None
    with_adapter(policy)
    for version in (0, 1, 1):
        move(policy.model, size=0.1)
        stream = transport.weights(policy.model, torch.float32)
        known = staged.checksums if staged else {}
        staged = stage(transport, policy, stream, tmp_path / f"weights-{version}", version, None, known)
    first, second = tmp_path / "weights-0", tmp_path / "weights-1"
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    (shard,) = second.glob("model-*.safetensors")
    assert os.path.samefile(shard, first / shard.name), "the base is written once"
    factors = load_file(second / "adapter" / "adapter_model.safetensors")
    expected = dict(adapter_weights(policy.model))
    assert {f"base_model.model.{name}.weight" for name in expected} == set(factors)
    assert all(torch.equal(factors[f"base_model.model.{name}.weight"], tensor) for name, tensor in expected.items())
    settings = json.loads((second / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, 2), "the scaling is part of B"
    engine = Checksums(fused=True)
    base = load_file(shard)
    for name, _ in full_weights(policy.model, adapter=False):
        engine.add(name.replace("_proj.weight", "_proj.base_layer.weight"), base[name])
    for name, tensor in expected.items():
        engine.add(name, tensor)
    assert checksum_complaint(engine.hexdigests(), staged.checksums, 64) is None
    assert len(staged.checksums) > len(expected)


@pytest.mark.parametrize("backend", ["hf_server", "vllm_server"])
def test_gloo_takes_weights_to_servers_named_by_address(policy, serve, connect, backend):
    servers = serve(), serve()
    engines = connect(*servers, backend=backend, transport="gloo")
    draw(engines)
    move(policy.model)
    engines.update_weights(1)
    for server in servers:
        assert torch.equal(server.engine.loaded.model.lm_head.weight, policy.model.lm_head.weight)
    order = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    calls = servers[0].calls
    assert [path for path in calls if path in order] == 2 * order
    tensors = engines._staged.tensors
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"], "a tied weight is in memory once"


def test_a_server_lost_in_a_transfer_costs_the_others_nothing_and_is_sent_to_again(policy, serve, connect):
    """The first time, the weights of one server stop in the middle."""
    lost, well = serve(), serve()
    engines = connect(lost, well, transport="gloo", retries=1)
    draw(engines)
    receive, broken = lost.engine.receive, threading.Event()

    def stop_in_the_middle(info):
        if broken.is_set():
            return receive(info)
        broken.set()
        raise RuntimeError("Connection closed by peer")

    lost.engine.receive = stop_in_the_middle
    move(policy.model)
    engines.update_weights(1)
    assert broken.is_set() and engines.restarts == 1
    rows = draw(engines)
    assert {version for row in rows for version in row.versions} == {1}
    for server in (lost, well):
        assert torch.equal(server.engine.loaded.model.lm_head.weight, policy.model.lm_head.weight)


def test_rank_0_does_not_wait_for_a_server_that_was_lost_before_it_met_it(policy, serve, connect, monkeypatch):
    engines, connect_to_trainer, lost = connect(serve(), transport="gloo", retries=1), transports.connect_to_trainer, []

    def lose_once(address, rank):
        if not lost:
            lost.append(rank)
            raise RuntimeError("Connection closed by peer")
        return connect_to_trainer(address, rank)

    monkeypatch.setattr(transports, "connect_to_trainer", lose_once)
    rows = draw(engines)
    assert engines.restarts == 1 and {version for row in rows for version in row.versions} == {0}


def test_a_transfer_that_stalls_is_given_up_and_made_again(policy, serve, connect, monkeypatch):
    """The first time, the server has met the trainer and waits for more than is sent."""
    monkeypatch.setattr(transports, "STALL_LIMIT_S", 0.5)
    server, connect_to_trainer, stalled = serve(), transports.connect_to_trainer, []

    def stall_once(address, rank):
        connection = connect_to_trainer(address, rank)
        if not stalled:
            stalled.append(address.timeout_s)
            with pytest.raises(OSError):
                transports.received(connection, 10**9)
            raise RuntimeError("timed out")
        return connection

    monkeypatch.setattr(transports, "connect_to_trainer", stall_once)
    engines = connect(server, transport="gloo", retries=1)
    rows = draw(engines)
    assert stalled == [0.5] and engines.restarts == 1 and {version for row in rows for version in row.versions} == {0}


connect_to_trainer = transports.connect_to_trainer


class Stranger(threading.Thread):
    """A process of the machine that connects to rank 0 before the server does, as often as it is sent away.

    ``speaks``: nothing; bytes that prove nothing; rank 1's greeting with another secret. ``got``: what it was sent.
    """

    def __init__(self, address, speaks):
        super().__init__(daemon=True)
        self.address, self.speaks, self.got, self.greeted = address, speaks, [], threading.Event()
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                self.connect()

    def connect(self):
        with socket.create_connection((self.address.host, self.address.port), timeout=20) as connection:
            if self.speaks == "guesses":
                guess = dataclasses.replace(self.address, secret="ff" * transports.SECRET_BYTES)
                self.greeted.set()
                with pytest.raises((OSError, RuntimeError)):
                    connect_to_trainer(guess, 1)
                return
            if self.speaks == "garbage":
                connection.sendall(b"\0" * 1000)
            self.greeted.set()
            self.got.append(b"".join(iter(lambda: connection.recv(4096), b"")))


@pytest.mark.parametrize("speaks", ["silence", "garbage", "guesses"])
def test_who_connects_before_the_server_is_sent_nothing_and_ends_nothing(policy, serve, connect, monkeypatch, speaks):
    """Two strangers are there first in each of two transfers; the server takes both."""
    monkeypatch.setattr(transports, "GREETING_S", 1.0)
    strangers = []

    def come_third(address, rank):
        first = [Stranger(address, speaks) for _ in range(2)]
        strangers.extend(first)
        assert all(stranger.greeted.wait(20) for stranger in first)
        return connect_to_trainer(address, rank)

    monkeypatch.setattr(transports, "connect_to_trainer", come_third)
    server = serve()
    engines = connect(server, transport="gloo", retries=0)
    draw(engines)
    move(policy.model)
    engines.update_weights(1)
    assert torch.equal(server.engine.loaded.model.lm_head.weight, policy.model.lm_head.weight)
    assert engines.restarts == 0 and len(strangers) == 4
    for stranger in strangers:
        stranger.join(20)
        assert not stranger.is_alive()
        assert {len(data) for data in stranger.got} <= {0, transports.SECRET_BYTES}, "a challenge, and no weights"


def test_a_server_takes_nothing_from_a_listener_that_does_not_know_the_secret():
    """Another process may listen where a trainer was that died."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = transports.TrainerAddress(
            host="127.0.0.1", port=listener.getsockname()[1], secret="00" * transports.SECRET_BYTES, timeout_s=20
        )

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(transports.SECRET_BYTES))
                greeting = transports.received(connection, 4 + 2 * transports.SECRET_BYTES)
                connection.sendall(greeting[-transports.SECRET_BYTES :])  # the worker's own proof
                connection.sendall(bytes(1000))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RuntimeError, match="does not know the secret"):
            transports.connect_to_trainer(address, 1)
        thread.join()
    assert "00" * transports.SECRET_BYTES not in repr(address)


@pytest.mark.parametrize("named", [False, True])
def test_weights_on_disk_are_for_this_user_alone_unless_the_folder_was_named(policy, serve, connect, tmp_path, named):
    (tmp_path / "run").mkdir()
    before = os.umask(0o022)
    try:
        options = {"weights_dir": str(tmp_path / "named")} if named else {}
        engines = connect(serve(), transport="folder", **options)
        engines.work_in(tmp_path / "run")
        draw(engines)
    finally:
        os.umask(before)
    folder = tmp_path / "named" if named else tmp_path / "run" / "sampler"
    assert list(folder.glob("weights-*")) and folder.stat().st_mode & 0o777 == (0o755 if named else 0o700)


def test_a_taken_port_is_replaced_by_another(policy, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = iter([taken.getsockname()[1]])
        free_port = servers_module.free_port
        monkeypatch.setattr(servers_module, "free_port", lambda: next(ports, None) or free_port())
        monkeypatch.setattr(servers_module, "ChildProcess", ForkedServer)
        config = RolloutConfig(backend="hf_server", batch_sequences=8, temperature=1.3, options={"threads": 1})
        backend = build_hf_server(config, loaded=policy)
        backend.work_in(tmp_path)
        try:
            assert draw(backend, [PROMPT]) == draw(build_hf(RolloutConfig(), loaded=policy), [PROMPT])
            assert backend.restarts == 1
        finally:
            backend.close()


def test_a_mistake_in_the_transport_leaves_nothing_started(policy, tmp_path):
    with pytest.raises(UserError, match=r"rollout\.options\.transport: got 'nccl'"):
        build_hf_server(RolloutConfig(options={"transport": "nccl"}), loaded=policy)
    with pytest.raises(UserError, match=r"rollout\.options\.transport: got 'ipc'"):
        build_vllm_server(RolloutConfig(options={"transport": "ipc", "urls": ["http://a:1"]}), loaded=policy)


def test_a_server_that_does_not_take_its_weights_is_no_endless_wait(serve, connect):
    """It answers at once without joining the group."""
    server = serve()
    engines = connect(server, transport="gloo", retries=0)
    server.answers["/update_weights"] = (200, {})
    message = r"urls: got .*which take its weights by gloo \(no inference server took .*without taking the weights"
    with pytest.raises(UserError, match=message):
        draw(engines)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, []),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"},
            ["expandable_segments:False,max_split_size_mb:64", "expandable_segments:True,max_split_size_mb:64"],
        ),
        (
            {"PYTORCH_ALLOC_CONF": " expandable_segments : true", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            ["expandable_segments:False", " expandable_segments : true"],
        ),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_weights_shared_between_processes_of_a_gpu_are_in_no_expandable_segment(
    monkeypatch, variables, expected, fails
):
    """The allocator is a recorder here: what it is set to, and when the weights were allocated and exported."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    events = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", events.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    for name in ("synchronize", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)

    class Weight(torch.Tensor):
        def to(self, device):
            events.append("allocated")
            if fails:
                raise torch.cuda.OutOfMemoryError
            return self

    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", lambda tensor: (None, ("handle",)))
    server = SimpleNamespace(call=lambda path, **body: {})
    weights = SimpleNamespace(tensors={"w": torch.zeros(1).as_subclass(Weight)})
    with pytest.raises(torch.cuda.OutOfMemoryError) if fails else contextlib.nullcontext():
        TRANSPORTS["ipc"](torch.device("cpu")).send(weights, server)
    assert events == [*expected[:1], "allocated", *expected[1:]]
