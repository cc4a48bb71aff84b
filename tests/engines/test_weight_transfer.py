"""Weights to vLLM: its own nccl and ipc engines against a fake wire; folder, gloo and adapter to real servers, from
one process and from two FSDP2 ranks."""

import contextlib
import itertools
import json
import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from kl_comedy.config.schema import LoraConfig, ModelConfig, RolloutConfig
from kl_comedy.models.sharding import load_sharded
from kl_comedy.models.weights import full_weights
from kl_comedy.rollouts import Sampling, build_vllm_server
from kl_comedy.rollouts.engines import transports
from kl_comedy.rollouts.engines.client import Client, ServerTrouble
from kl_comedy.rollouts.engines.transports import TRANSPORTS, stage
from kl_comedy.rollouts.engines.weights import checksum_complaint
from ranks import spawn
from small_policies import POCKET, PROMPTS, largest_gap, pocket

TOLERANCE = 5e-5
"""Nats, float32; as in process."""
GAP = 1e-4
KINDS = ("folder", "gloo", "adapter")


# --- vLLM's own engines, without a GPU ---------------------------------------------------------------------------


class Wire:
    """A communicator of rank 0 and one worker: what the one broadcasts, the other receives."""

    def __init__(self):
        self.tensors = queue.Queue()
        self.trainer = SimpleNamespace(broadcast=lambda tensor, src, stream: self.tensors.put(tensor.clone()))
        self.worker = SimpleNamespace(broadcast=self.receive)

    def receive(self, tensor, src, stream):
        sent = self.tensors.get(timeout=20)
        assert (sent.dtype, sent.shape) == (tensor.dtype, tensor.shape)
        tensor.copy_(sent)


class Worker(Client):
    """A server that has one of vLLM's engines in this process. ``calls``: the paths that were asked for.

    ``in_update``: an update was started; as vLLM, it starts none before that one ends.
    """

    def __init__(self, engine):
        super().__init__("http://127.0.0.1:1", key=None, timeout_s=20)
        self.engine, self.calls, self.label, self.in_update = engine, [], None, False
        self.init_info = None

    def _request(self, method, path, **content):
        body = content.get("json") or {}
        self.calls.append(path)
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/init_weight_transfer_engine":
            self.init_info = body["init_info"]
            self.engine.init_transfer_engine(self.engine.parse_init_info(self.init_info))
        if path == "/start_weight_update" and self.in_update:
            raise ServerTrouble("a weight update is already active")
        self.in_update = path == "/start_weight_update" or (self.in_update and path != "/finish_weight_update")
        if path == "/update_weights":  # what vLLM's worker does, but for waiting for a GPU
            self.engine.receive_weights(self.engine.parse_update_info(body["update_info"]))
        self.label = body.get("new_version", self.label)
        return {"success": True}


@pytest.fixture
def no_gpu_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *arguments, **named: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    for name in ("synchronize", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))


def engine_of(engine_class, received):
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    model = SimpleNamespace(load_weights=lambda pairs: received.extend((name, t.clone()) for name, t in pairs))
    return engine_class(SimpleNamespace(), config, torch.device("cuda", 0), model)


def nccl(monkeypatch, received):
    from vllm.distributed.weight_transfer import nccl_common, nccl_engine

    wire = Wire()
    monkeypatch.setattr(TRANSPORTS["nccl"], "packed", False)  # packing needs CUDA streams
    monkeypatch.setattr(transports, "new_nccl_id", lambda: bytes(range(128)))
    monkeypatch.setattr(nccl_common, "uid_init_process_group", lambda unique_id, rank, size, device: wire.trainer)
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda info, parallel: wire.worker)
    engine = engine_of(nccl_engine.NCCLWeightTransferEngine, received)
    engine.device = torch.device("cpu")
    return engine


def ipc(monkeypatch, received):
    from vllm.distributed.weight_transfer import ipc_engine

    memory = []
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    handle = torch.multiprocessing.reductions
    monkeypatch.setattr(handle, "reduce_tensor", lambda t: (None, (*range(7), memory.append(t) or len(memory) - 1)))
    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", lambda *arguments: memory[arguments[7]])
    return engine_of(ipc_engine.IPCWeightTransferEngine, received)


@pytest.mark.usefixtures("no_gpu_is_needed")
@pytest.mark.parametrize("prepare", [nccl, ipc])
def test_vllm_s_own_engines_receive_every_weight_in_order(monkeypatch, tmp_path, prepare):
    """Names, dtypes, shapes and values; a tied weight once; the version is named last, for two updates. The first comes
    after one whose trainer was lost.

    Only the communicator and CUDA's handles are fakes.
    """
    policy, received = pocket(tie_word_embeddings=True), []
    server = Worker(prepare(monkeypatch, received))
    transport = TRANSPORTS[prepare.__name__](torch.device("cpu"))
    for version in (3, 4):
        received.clear()
        server.calls.clear()
        server.in_update = version == 3
        stream = full_weights(policy.model, torch.bfloat16)
        staged = stage(transport, policy, stream, tmp_path / f"{version}", version, None, {})
        server.take_weights(staged, transport)
        expected = [(n, t) for n, t in full_weights(policy.model, torch.bfloat16) if n != "lm_head.weight"]
        assert [name for name, _ in received] == [name for name, _ in expected]
        for (name, tensor), (_, wanted) in zip(received, expected, strict=True):
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, wanted), name
        update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
        after = ["/reset_prefix_cache", "/update_weight_version", "/resume"]
        calls = [path for path in server.calls if "init" not in path and "world" not in path]
        lost = ["/start_weight_update", "/finish_weight_update"] if version == 3 else []
        assert calls == ["/pause", "/update_weight_version", *lost, *update, *after]
        assert server.label == f"kl_comedy/-/{version}"
        assert not server.init_info.keys() & {"master_address", "master_port"}, "nobody meets in a store without a key"
        with torch.no_grad():
            for weight in policy.model.parameters():
                weight.mul_(1.5)


@pytest.mark.usefixtures("no_gpu_is_needed")
@pytest.mark.parametrize("place", ["rendezvous", "broadcast", "call"])
def test_an_nccl_transfer_that_hangs_is_given_up_in_time_and_the_next_one_works(monkeypatch, tmp_path, place):
    """NCCL itself has no limit. Where a call to the server fails, nothing is waited for."""
    from vllm.distributed.weight_transfer import nccl_common, nccl_engine

    policy, received, aborted = pocket(), [], threading.Event()
    engine = nccl(monkeypatch, received)
    server, transport = Worker(engine), TRANSPORTS["nccl"](torch.device("cpu"))
    server.timeout_s = 60 if place == "call" else 1
    well, request = nccl_common.uid_init_process_group, server._request

    def hang(*arguments, **named):
        aborted.wait(30)
        raise RuntimeError("aborted")

    def lost(method, path, **content):
        if path == "/update_weights":
            raise ServerTrouble("/update_weights: ConnectError")
        return request(method, path, **content)

    with monkeypatch.context() as patch:
        if place == "rendezvous":
            patch.setattr(nccl_common, "uid_init_process_group", hang)
        else:
            group = SimpleNamespace(broadcast=hang, destroy=aborted.set)
            patch.setattr(nccl_common, "uid_init_process_group", lambda *arguments: group)
            patch.setattr(nccl_engine, "worker_init_process_group", lambda info, parallel: group)
        patch.setattr(server, "_request", lost if place == "call" else request)
        staged = stage(transport, policy, full_weights(policy.model), tmp_path / "1", 1, None, {})
        begin = time.monotonic()
        message = "ConnectError" if place == "call" else "nccl did not end within 1 s"
        with pytest.raises(ServerTrouble, match=message):
            server.take_weights(staged, transport)
        assert time.monotonic() - begin < 10
        assert aborted.is_set() == (place != "rendezvous"), "ncclCommAbort ends what waits on the GPU"
        aborted.set()
        received.clear()
        label = server.label
        time.sleep(0.2)
        assert server.label == label and not received, "what was given up sends nothing later"
    assert nccl_common.uid_init_process_group is well
    server.take_weights(staged, transport)
    assert len(received) == len(dict(full_weights(policy.model))) and server.label == "kl_comedy/-/1"


# --- real servers ----------------------------------------------------------------------------------------------


def build(policy, folder, *, leader=True, **options):
    config = RolloutConfig(backend="vllm_server", batch_sequences=16, temperature=0.7, options=options)
    backend = build_vllm_server(config, loaded=policy, leader=leader)
    if leader:
        backend.work_in(folder)
    return backend


def draw(backend, seed=0):
    return backend.generate(PROMPTS, group_size=3, sampling=Sampling(temperature=1.0, max_new_tokens=20), seed=seed)


def move_evenly(model):
    """As an update: what is trained, the same in one process and in shards."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.mul_(1.1).add_(0.01 if "lora_B" not in name else 0.03)


def compared(backend):
    """How many checksums of the first server are comparable with the trainer's; none of them differs."""
    staged, (server, *_) = backend._staged, backend._servers
    engine = backend._transport.checksums(server.client)
    assert checksum_complaint(engine, staged.checksums, staged.vocabulary) is None
    names = {name.rpartition(":")[2].replace(".base_layer.", ".") for name in engine}
    factors = {name for name in staged.checksums if ".lora_" in name}
    assert factors <= names
    equal = [
        n for n, d in engine.items() if d == staged.checksums.get(n.rpartition(":")[2].replace(".base_layer.", "."))
    ]
    return len(equal)


@pytest.mark.parametrize("kind", ["adapter", pytest.param("folder", marks=pytest.mark.slow)])
def test_a_server_computes_with_what_was_sent(tmp_path, kind):
    """Gloo, the default here, is what test_servers.py runs on."""
    policy = pocket(lora=kind == "adapter")
    move_evenly(policy.model)
    backend = build(policy, tmp_path, **({} if kind == "adapter" else {"transport": kind}))
    try:
        for version in (0, 1, 2):
            if version:
                move_evenly(policy.model)
                assert largest_gap(policy, draw(backend)) > 0.02, "it has the new weights already"
                backend.update_weights(version)
            rows = draw(backend, seed=version)
            assert largest_gap(policy, rows) < TOLERANCE
            assert {each for row in rows for each in row.versions} == {version}
            assert compared(backend) >= 3
    finally:
        backend.close()


def to_servers(rank, world, folder, kind):
    """What a server drew after each of two updates, and how many of its checksums equal those of the shards."""
    config = ModelConfig(source="pocket", options=POCKET, lora=LoraConfig(rank=4) if kind == "adapter" else None)
    policy = load_sharded(config, limit_bytes=2**30)
    options = {} if kind == "adapter" else {"transport": kind}
    backend = build(policy, folder / kind, leader=rank == 0, **options)
    updates = []
    for version in (1, 2):
        move_evenly(policy.model)
        backend.update_weights(version)
        if rank == 0:
            updates.append(
                [compared(backend), [(row.completion_ids, row.logps, row.versions) for row in draw(backend)]]
            )
    backend.close()
    return updates


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_fsdp_ranks_update_a_server(tmp_path, kind):
    updates, nothing = spawn(to_servers, tmp_path, kind)
    assert nothing == []
    whole = pocket(lora=kind == "adapter")
    for version, (equal, rows) in enumerate(updates, 1):
        move_evenly(whole.model)
        assert equal >= 3
        rollouts = [
            SimpleNamespace(completion_ids=tuple(ids), prompt=PROMPTS[n // 3], logps=logps)
            for n, (ids, logps, _) in enumerate(rows)
        ]
        gap = largest_gap(whole, rollouts)
        print(f"{kind}, version {version}: {equal} checksums equal, largest gap {gap:.1e} nats")
        assert gap < TOLERANCE
        assert {each for _, _, versions in rows for each in versions} == {version}


LAGS = {
    "on-policy": [],
    "async": ["lag.mode=async", "lag.max_steps=1"],
    "in flight": ["lag.mode=async", "lag.max_steps=2", "lag.in_flight=true", "rollout.max_new_tokens=60"],
}
CASES = [
    pytest.param(lag, kind, marks=[] if (lag, kind) == ("async", "gloo") else pytest.mark.slow)
    for lag, kind in itertools.product(LAGS, KINDS)
]


@pytest.mark.parametrize(("lag", "kind"), CASES)
def test_two_fsdp_ranks_train_with_a_server(tmp_path, monkeypatch, lag, kind):
    """Four updates; samples of the current weights, by the versions of their tokens, have the trainer's log-probs."""
    import rank_runs
    from training_runs import metrics_of

    monkeypatch.setattr(rank_runs, "MODULES", [])  # real processes for real servers
    words = [
        "rollout.backend=vllm_server",
        f"rollout.options={{transport: {kind}, kv_cache_gib: 0.1}}",
        "model.options={preset: tiny, heads: 2}",
        f"model.lora={'{rank: 4}' if kind == 'adapter' else 'null'}",
        "train.steps=4",
        "train.eval_every=0",
        "train.record_rollouts=jsonl",
        "eval.at_start=false",
        "eval.at_end=false",
        f"optimizer.lr={0.03 if kind == 'adapter' else 0.01}",
        "rollout.batch_sequences=16",
        "kl.0.reference=initial",
        *LAGS[lag],
    ]
    run = rank_runs.over(tmp_path / "run", "fsdp", *words)
    metrics = metrics_of(run)
    gaps = {step: value for (step, name), value in metrics.items() if name == "policy/behaviour_gap_max"}
    batches = [file.read_text().splitlines() for file in sorted((run.path / "rollouts").glob("batch-*.jsonl"))]
    versions = [{version for line in lines for version in json.loads(line)["versions"]} for lines in batches]
    print(f"{lag}, {kind}: versions {versions}, gaps {gaps}")
    assert sorted(gaps) == [1, 2, 3, 4] and len(batches) == 4
    for number, drawn in enumerate(versions):
        assert max(drawn) <= number and number - min(drawn) <= {"on-policy": 0, "async": 1, "in flight": 2}[lag]
        assert (gaps[number + 1] < GAP) == (drawn == {number}), (number, drawn, gaps)
        assert metrics[number + 1, "policy/staleness_max"] == number - min(drawn)
    assert lag == "on-policy" or any(min(drawn) < number for number, drawn in enumerate(versions)), "none drawn ahead"
