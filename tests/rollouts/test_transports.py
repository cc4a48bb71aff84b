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
from kl_comedy.errors import UserError, first_refusal
from kl_comedy.models import weights as model_weights
from kl_comedy.models.lora import add_lora
from kl_comedy.models.weights import Checksums, adapter_weights, full_weights
from kl_comedy.rollouts import build_hf, build_hf_server, build_vllm_server
from kl_comedy.rollouts.engines import servers as servers_module
from kl_comedy.rollouts.engines import transports
from kl_comedy.rollouts.engines.options import (
    TRANSPORT_RULES,
    HFServerOptions,
    Placement,
    VLLMServerOptions,
    server_gpus,
    transport_of,
)
from kl_comedy.rollouts.engines.transports import TRANSPORTS, AdapterTransport, stage
from kl_comedy.rollouts.engines.weights import checksum_complaint
from small_policies import versions_of

pytestmark = pytest.mark.usefixtures("short_polls")

# The original: tests replace the name in ``transports`` by functions that call this one.
connect_to_trainer = transports.connect_to_trainer

URLS = ("http://a:1",)
# Options, whether only an adapter is trained, the GPUs of the machine, and the transport that is chosen.
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
    (VLLMServerOptions(gpus=("2,3",), tensor_parallel_size=2), False, list("0123"), "nccl"),
    (VLLMServerOptions(servers=2, gpus=("2,3", "4,5"), tensor_parallel_size=2), False, list("012345"), "gloo"),
]
# Options, the GPUs of the machine, and what the refusal says.
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


# Options, whether only an adapter is trained, KL_COMEDY_SERVERS_BY_CONFIG, and the transport.
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


@pytest.mark.parametrize("rule", TRANSPORT_RULES, ids=lambda rule: rule.__name__)
def test_each_rule_against_a_transport_is_met_by_its_example(rule):
    options, gpus = RULES[rule.__name__]
    place = Placement(options=options, lora=False, gpus=gpus, servers=[gpus] if gpus and not options.urls else [])
    reason = rule(place)
    assert reason is not None
    assert first_refusal(TRANSPORT_RULES, place) == reason
    with pytest.raises(UserError) as caught:
        transport_of(options, lora=False, gpus=gpus)
    assert reason in str(caught.value)


def test_every_server_has_gpus_of_its_own():
    assert server_gpus(VLLMServerOptions(servers=2, tensor_parallel_size=2), list("0123")) == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize("adapted", [False, True])
def test_a_tied_weight_is_gathered_once_and_comes_under_both_names(monkeypatch, adapted):
    base = llama(tied=True)
    model = llama(tied=True)
    if adapted:
        model = add_lora(model, LoraConfig(rank=2, target_modules=["q_proj"]))
    expected_gathers = len(list(model.parameters()))
    gathered = []

    def gather(bucket, original=model_weights.gathered):
        gathered.extend(name for name, _ in bucket)
        return original(bucket)

    monkeypatch.setattr(model_weights, "gathered", gather)
    stream = list(full_weights(model, torch.bfloat16))
    sent = dict(stream)
    assert len(sent) == len(stream), "each name once"
    assert sent["lm_head.weight"] is sent["model.embed_tokens.weight"]
    assert len(gathered) == expected_gathers
    assert set(sent) == set(base.state_dict())


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
    base = dict(full_weights(policy.model, adapter=False))
    factors = dict(adapter_weights(policy.model))
    assert set(base) == set(merged)
    assert len(factors) == 2 * 3 * 2, "two factors for three modules of two layers"
    for module in {name.rpartition(".")[0] for name in factors}:
        product = factors[f"{module}.lora_B"] @ factors[f"{module}.lora_A"]
        parts = dict(policy.model.get_submodule(f"base_model.model.{module}").named_parameters())
        # Rank 2 and alpha 3.
        expected = 3 / 2 * parts["lora_B.default.weight"].double() @ parts["lora_A.default.weight"].double()
        torch.testing.assert_close(product.double(), expected, atol=1e-5, rtol=1e-5, msg=module)
        base[f"{module}.weight"] = (base[f"{module}.weight"].double() + expected).float()
    for name, tensor in merged.items():
        torch.testing.assert_close(base[name], tensor, msg=name)


@pytest.fixture
def staged_twice(policy, tmp_path):
    """What was staged last of an adapter's versions 0 and 1; version 1 twice, as where its first sending failed."""
    transport = AdapterTransport()
    with_adapter(policy)
    staged = None
    known_checksums = {}
    for version in (0, 1, 1):
        move(policy.model, size=0.1)
        stream = transport.weights(policy.model, torch.float32)
        folder = tmp_path / f"weights-{version}"
        staged = stage(transport, policy, stream, folder, version, None, known_checksums)
        known_checksums = staged.checksums
    return staged


def test_an_adapter_is_staged_alone_beside_links_to_the_base(policy, tmp_path, staged_twice):
    first = tmp_path / "weights-0"
    second = tmp_path / "weights-1"
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    (shard,) = second.glob("model-*.safetensors")
    assert os.path.samefile(shard, first / shard.name), "the base is written once"


def test_a_staged_adapter_is_read_back_as_peft_writes_it(policy, tmp_path, staged_twice):
    folder = tmp_path / "weights-1" / "adapter"
    factors = load_file(folder / "adapter_model.safetensors")
    expected = {f"base_model.model.{name}.weight": tensor for name, tensor in adapter_weights(policy.model)}
    assert set(factors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(factors[name], tensor), name
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["r"] == 2
    assert settings["lora_alpha"] == 2, "the scaling is part of B"


def test_an_engines_checksums_of_base_and_adapter_are_those_staged(policy, tmp_path, staged_twice):
    factors = dict(adapter_weights(policy.model))
    (shard,) = (tmp_path / "weights-1").glob("model-*.safetensors")
    base = load_file(shard)
    engine = Checksums(fused=True)
    for name, _ in full_weights(policy.model, adapter=False):
        # Under the name that a layer has within vLLM's adapted layer.
        engine.add(name.replace("_proj.weight", "_proj.base_layer.weight"), base[name])
    for name, tensor in factors.items():
        engine.add(name, tensor)
    assert checksum_complaint(engine.hexdigests(), staged_twice.checksums, 64) is None
    assert len(staged_twice.checksums) > len(factors), "those of the base are known from version 0"


@pytest.mark.parametrize("backend", ["hf_server", "vllm_server"])
def test_gloo_takes_weights_to_servers_named_by_address(policy, serve, connect, backend):
    servers = [serve(), serve()]
    engines = connect(*servers, backend=backend, transport="gloo")
    draw(engines)
    move(policy.model)
    engines.update_weights(1)
    for server in servers:
        assert torch.equal(server.engine.loaded.model.lm_head.weight, policy.model.lm_head.weight)
    # What vLLM's own engines are asked for; ours answers the same requests.
    order = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    calls_of_transfers = [path for path in servers[0].calls if path in order]
    assert calls_of_transfers == 2 * order, "for the first weights and the update"
    tensors = engines._staged.tensors
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"], "a tied weight is in memory once"


def test_a_server_lost_in_a_transfer_costs_the_others_nothing_and_is_sent_to_again(policy, serve, connect):
    """The first time, the weights of one server stop in the middle."""
    lost = serve()
    well = serve()
    engines = connect(lost, well, transport="gloo", retries=1)
    draw(engines)
    receive = lost.engine.receive
    broken = threading.Event()

    def stop_in_the_middle(info):
        if broken.is_set():
            return receive(info)
        broken.set()
        raise RuntimeError("Connection closed by peer")

    lost.engine.receive = stop_in_the_middle
    move(policy.model)
    engines.update_weights(1)
    assert broken.is_set()
    assert engines.restarts == 1
    assert versions_of(draw(engines)) == {1}
    for server in (lost, well):
        assert torch.equal(server.engine.loaded.model.lm_head.weight, policy.model.lm_head.weight)


def test_rank_0_does_not_wait_for_a_server_that_was_lost_before_it_met_it(policy, serve, connect, monkeypatch):
    engines = connect(serve(), transport="gloo", retries=1)
    lost_ranks = []

    # The server's side: rank 0 listens already when this is called.
    def lose_once(address, rank):
        if not lost_ranks:
            lost_ranks.append(rank)
            raise RuntimeError("Connection closed by peer")
        return connect_to_trainer(address, rank)

    monkeypatch.setattr(transports, "connect_to_trainer", lose_once)
    rows = draw(engines)
    assert engines.restarts == 1
    assert versions_of(rows) == {0}


def test_a_transfer_that_stalls_is_given_up_and_made_again(policy, serve, connect, monkeypatch):
    """The first time, the server has met the trainer and waits for more than is sent."""
    monkeypatch.setattr(transports, "STALL_LIMIT_S", 0.5)
    limits_of_stalled = []

    def stall_once(address, rank):
        connection = connect_to_trainer(address, rank)
        if not limits_of_stalled:
            limits_of_stalled.append(address.timeout_s)
            with pytest.raises(OSError):
                transports.received(connection, 10**9)
            raise RuntimeError("timed out")
        return connection

    monkeypatch.setattr(transports, "connect_to_trainer", stall_once)
    engines = connect(serve(), transport="gloo", retries=1)
    rows = draw(engines)
    assert limits_of_stalled == [0.5]
    assert engines.restarts == 1
    assert versions_of(rows) == {0}


class Stranger(threading.Thread):
    """A process of the machine that connects to rank 0 before the server does, as often as it is sent away.

    ``speaks``: nothing; bytes that prove nothing; rank 1's greeting with another secret. ``received``: what came, each
    time.
    """

    def __init__(self, address, speaks):
        super().__init__(daemon=True)
        self.address = address
        self.speaks = speaks
        self.received = []
        self.greeted = threading.Event()
        self.start()

    def run(self):
        # Until nobody listens any more: the transfer is over.
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
            # Those that guess play the greeting through; the others wait for what they are sent.
            if self.speaks == "garbage":
                connection.sendall(b"\0" * 1000)
            self.greeted.set()
            self.received.append(received_until_closed(connection))


def received_until_closed(connection):
    received = b""
    part = connection.recv(4096)
    while part:
        received += part
        part = connection.recv(4096)
    return received


@pytest.mark.parametrize("speaks", ["silence", "garbage", "guesses"])
def test_who_connects_before_the_server_is_sent_nothing_and_ends_nothing(policy, serve, connect, monkeypatch, speaks):
    """Two strangers are there first in each of two transfers; the server takes both."""
    monkeypatch.setattr(transports, "GREETING_S", 1.0)
    strangers = []

    def come_third(address, rank):
        earlier = [Stranger(address, speaks), Stranger(address, speaks)]
        strangers.extend(earlier)
        for stranger in earlier:
            assert stranger.greeted.wait(20)
        return connect_to_trainer(address, rank)

    monkeypatch.setattr(transports, "connect_to_trainer", come_third)
    server = serve()
    engines = connect(server, transport="gloo", retries=0)
    draw(engines)
    move(policy.model)
    engines.update_weights(1)
    assert torch.equal(server.engine.loaded.model.lm_head.weight, policy.model.lm_head.weight)
    assert engines.restarts == 0
    assert len(strangers) == 4
    for stranger in strangers:
        stranger.join(20)
        assert not stranger.is_alive()
        for data in stranger.received:
            assert len(data) in (0, transports.SECRET_BYTES), "a challenge at most, and no weights"


def test_a_server_takes_nothing_from_a_listener_that_does_not_know_the_secret():
    """Another process may listen where a trainer was that died."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = transports.TrainerAddress(
            host="127.0.0.1", port=listener.getsockname()[1], secret="00" * transports.SECRET_BYTES, timeout_s=20
        )

        def answer():
            connection, _ = listener.accept()
            with connection:
                # A challenge, as rank 0 sends one; then the answer of one that can only repeat what it hears.
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


@pytest.fixture
def usual_umask():
    """The permissions of new files that most machines have: others may read them."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_weights_on_disk_are_for_this_user_alone(serve, connect, tmp_path, usual_umask):
    engines = connect(serve(), transport="folder")
    (tmp_path / "run").mkdir()
    engines.work_in(tmp_path / "run")
    draw(engines)
    folder = tmp_path / "run" / "sampler"
    assert list(folder.glob("weights-*"))
    assert folder.stat().st_mode & 0o777 == 0o700


def test_weights_in_a_folder_that_the_config_names_are_for_whom_the_user_lets_read(
    serve, connect, tmp_path, usual_umask
):
    folder = tmp_path / "named"
    engines = connect(serve(), transport="folder", weights_dir=str(folder))
    (tmp_path / "run").mkdir()
    engines.work_in(tmp_path / "run")
    draw(engines)
    assert list(folder.glob("weights-*"))
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_taken_port_is_replaced_by_another(policy, tmp_path, monkeypatch):
    free_port = servers_module.free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = [taken.getsockname()[1]]

        def taken_port_first():
            return ports.pop() if ports else free_port()

        # Another process took the port between the search for it and the start of the server.
        monkeypatch.setattr(servers_module, "free_port", taken_port_first)
        monkeypatch.setattr(servers_module, "ChildProcess", ForkedServer)
        config = RolloutConfig(backend="hf_server", batch_sequences=8, temperature=1.3, options={"threads": 1})
        backend = build_hf_server(config, loaded=policy)
        backend.work_in(tmp_path)
        try:
            assert draw(backend, [PROMPT]) == draw(build_hf(RolloutConfig(), loaded=policy), [PROMPT])
            assert backend.restarts == 1
        finally:
            backend.close()


def test_a_mistake_in_the_transport_leaves_nothing_started(policy):
    """It is found when the backend is built, which starts nothing."""
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
    ("variables", "expected_events"),
    [
        ({}, ["allocated"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, ["allocated"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, ["allocated"]),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"},
            [
                "expandable_segments:False,max_split_size_mb:64",
                "allocated",
                "expandable_segments:True,max_split_size_mb:64",
            ],
        ),
        (
            {"PYTORCH_ALLOC_CONF": " expandable_segments : true", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            ["expandable_segments:False", "allocated", " expandable_segments : true"],
        ),
    ],
)
@pytest.mark.parametrize("fails", [False, True], ids=["allocated", "out of memory"])
def test_weights_shared_between_processes_of_a_gpu_are_in_no_expandable_segment(
    monkeypatch, variables, expected_events, fails
):
    """The allocator is a recorder here: what it is set to, and when the weights were allocated and exported.

    Its settings are put back also where the allocation fails.
    """
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    events = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", events.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)

    class Weight(torch.Tensor):
        def to(self, device):
            events.append("allocated")
            if fails:
                raise torch.cuda.OutOfMemoryError
            return self

    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", lambda tensor: (None, ("handle",)))
    server = SimpleNamespace(call=lambda path, **body: {})
    weights = SimpleNamespace(tensors={"w": torch.zeros(1).as_subclass(Weight)})
    outcome = contextlib.nullcontext()
    if fails:
        outcome = pytest.raises(torch.cuda.OutOfMemoryError)
    with outcome:
        TRANSPORTS["ipc"](torch.device("cpu")).send(weights, server)
    assert events == expected_events
