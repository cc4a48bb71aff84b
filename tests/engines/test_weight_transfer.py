"""Weights to vLLM: its own nccl and ipc engines against a fake wire; by folder, gloo and adapter to real servers.

The real servers get them from one process and from two FSDP2 ranks.
"""

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
from small_policies import POCKET, PROMPTS, largest_gap, pocket, versions_of

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
        assert sent.dtype == tensor.dtype
        assert sent.shape == tensor.shape
        tensor.copy_(sent)


class Worker(Client):
    """A server that has one of vLLM's engines in this process. ``calls``: the paths that were asked for.

    ``in_update``: an update was started; as vLLM, it starts none before that one ends.
    """

    def __init__(self, engine):
        super().__init__("http://127.0.0.1:1", key=None, timeout_s=20)
        self.engine = engine
        self.calls = []
        self.label = None
        self.in_update = False
        self.init_info = None

    def _request(self, method, path, **content):
        body = content.get("json") or {}
        self.calls.append(path)
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/init_weight_transfer_engine":
            self.init_info = body["init_info"]
            self.engine.init_transfer_engine(self.engine.parse_init_info(self.init_info))
        if path == "/start_weight_update":
            if self.in_update:
                raise ServerTrouble("a weight update is already active")
            self.in_update = True
        if path == "/finish_weight_update":
            self.in_update = False
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
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))


def engine_of(engine_class, received):
    """One of vLLM's engines; the weights that it loads into its model are added to ``received``."""

    def load_weights(pairs):
        for name, tensor in pairs:
            received.append((name, tensor.clone()))

    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    model = SimpleNamespace(load_weights=load_weights)
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

    def reduce_tensor(tensor):
        """A handle of eight arguments; the last of them is the place in ``memory``."""
        memory.append(tensor)
        return None, (*range(7), len(memory) - 1)

    def rebuild_cuda_tensor(*arguments):
        return memory[arguments[7]]

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    return engine_of(ipc_engine.IPCWeightTransferEngine, received)


UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
LOST_UPDATE = ["/start_weight_update", "/finish_weight_update"]
"""The first is refused, since an update is active; that one is ended."""


@pytest.mark.usefixtures("no_gpu_is_needed")
@pytest.mark.parametrize("prepare", [nccl, ipc])
def test_vllm_s_own_engines_receive_every_weight_in_order(monkeypatch, tmp_path, prepare):
    """Names, dtypes, shapes and values; a tied weight once; the version is named last.

    For two updates; the first comes after one whose trainer was lost. Only the communicator and CUDA's handles are
    fakes.
    """
    policy = pocket(tie_word_embeddings=True)
    received = []
    server = Worker(prepare(monkeypatch, received))
    transport = TRANSPORTS[prepare.__name__](torch.device("cpu"))
    server.in_update = True
    for version, lost_update in ((3, LOST_UPDATE), (4, [])):
        received.clear()
        server.calls.clear()
        stream = full_weights(policy.model, torch.bfloat16)
        staged = stage(transport, policy, stream, tmp_path / f"{version}", version, None, {})
        server.take_weights(staged, transport)

        expected = dict(full_weights(policy.model, torch.bfloat16))
        del expected["lm_head.weight"]  # tied: it has come as the embedding
        assert [name for name, _ in received] == list(expected)
        for name, tensor in received:
            assert tensor.dtype == torch.bfloat16, name
            assert torch.equal(tensor, expected[name]), name
        calls = [path for path in server.calls if path not in ("/init_weight_transfer_engine", "/get_world_size")]
        before = ["/pause", "/update_weight_version"]
        after = ["/reset_prefix_cache", "/update_weight_version", "/resume"]
        assert calls == [*before, *lost_update, *UPDATE, *after]
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

    policy = pocket()
    received = []
    aborted = threading.Event()
    server = Worker(nccl(monkeypatch, received))
    transport = TRANSPORTS["nccl"](torch.device("cpu"))
    working_rendezvous = nccl_common.uid_init_process_group
    request = server._request

    def hang(*arguments, **named):
        aborted.wait(30)
        raise RuntimeError("aborted")

    def lose_the_weights(method, path, **content):
        if path == "/update_weights":
            raise ServerTrouble("/update_weights: ConnectError")
        return request(method, path, **content)

    if place == "call":
        server.timeout_s = 60
        message = "ConnectError"
    else:
        server.timeout_s = 1
        message = "nccl did not end within 1 s"

    with monkeypatch.context() as patch:
        if place == "rendezvous":
            patch.setattr(nccl_common, "uid_init_process_group", hang)
        else:
            group = SimpleNamespace(broadcast=hang, destroy=aborted.set)
            patch.setattr(nccl_common, "uid_init_process_group", lambda *arguments: group)
            patch.setattr(nccl_engine, "worker_init_process_group", lambda info, parallel: group)
        if place == "call":
            patch.setattr(server, "_request", lose_the_weights)
        staged = stage(transport, policy, full_weights(policy.model), tmp_path / "1", 1, None, {})
        begin = time.monotonic()
        with pytest.raises(ServerTrouble, match=message):
            server.take_weights(staged, transport)
        assert time.monotonic() - begin < 10
        has_a_communicator = place != "rendezvous"
        assert aborted.is_set() == has_a_communicator, "ncclCommAbort ends what waits on the GPU"
        aborted.set()
        received.clear()
        label = server.label
        time.sleep(0.2)
        assert server.label == label, "what was given up names no version later"
        assert not received, "what was given up sends nothing later"
    assert nccl_common.uid_init_process_group is working_rendezvous
    server.take_weights(staged, transport)
    assert len(received) == len(dict(full_weights(policy.model)))
    assert server.label == "kl_comedy/-/1"


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
                # B begins as zeros: an adapter needs more to be seen in the log-probs.
                step = 0.03 if "lora_B" in name else 0.01
                weight.mul_(1.1).add_(step)


def compared(backend):
    """How many checksums of the first server are comparable with the trainer's; none of them differs."""
    staged = backend._staged
    checksums = backend._transport.checksums(backend._servers[0].client)
    assert checksum_complaint(checksums, staged.checksums, staged.vocabulary) is None
    # Without the rank before the name and the layer that vLLM puts around an adapted one.
    engine = {name.rpartition(":")[2].replace(".base_layer.", "."): digest for name, digest in checksums.items()}
    factors = {name for name in staged.checksums if ".lora_" in name}
    assert factors <= set(engine)
    return sum(1 for name, digest in engine.items() if digest == staged.checksums.get(name))


def transport_options(kind):
    """The adapter alone is what a run with LoRA takes by itself."""
    if kind == "adapter":
        return {}
    return {"transport": kind}


@pytest.mark.parametrize("kind", ["adapter", pytest.param("folder", marks=pytest.mark.slow)])
def test_a_server_computes_with_what_was_sent(tmp_path, kind):
    """Gloo, the default here, is what test_servers.py runs on."""
    policy = pocket(lora=kind == "adapter")
    move_evenly(policy.model)
    backend = build(policy, tmp_path, **transport_options(kind))
    try:
        assert_drawn_by(policy, backend, version=0)
        for version in (1, 2):
            move_evenly(policy.model)
            assert largest_gap(policy, draw(backend)) > 0.02, "it has the new weights already"
            backend.update_weights(version)
            assert_drawn_by(policy, backend, version=version)
    finally:
        backend.close()


def assert_drawn_by(policy, backend, *, version):
    rows = draw(backend, seed=version)
    assert largest_gap(policy, rows) < TOLERANCE
    assert versions_of(rows) == {version}
    assert compared(backend) >= 3


def to_servers(rank, world, folder, kind):
    """What a server drew after each of two updates, and how many of its checksums equal those of the shards.

    A list of ``[checksums, rows]`` on rank 0, nothing on the others.
    """
    config = ModelConfig(source="pocket", options=POCKET)
    if kind == "adapter":
        config.lora = LoraConfig(rank=4)
    policy = load_sharded(config, limit_bytes=2**30)
    is_leader = rank == 0
    backend = build(policy, folder / kind, leader=is_leader, **transport_options(kind))
    updates = []
    for version in (1, 2):
        move_evenly(policy.model)
        backend.update_weights(version)
        if is_leader:
            rows = [(row.completion_ids, row.logps, row.versions) for row in draw(backend)]
            updates.append([compared(backend), rows])
    backend.close()
    return updates


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_fsdp_ranks_update_a_server(tmp_path, kind):
    updates, of_rank_1 = spawn(to_servers, tmp_path, kind)
    assert of_rank_1 == []
    whole = pocket(lora=kind == "adapter")
    for version, (equal_checksums, rows) in enumerate(updates, start=1):
        move_evenly(whole.model)
        assert equal_checksums >= 3
        rollouts = []
        for number, (ids, logps, versions) in enumerate(rows):
            prompt = PROMPTS[number // 3]  # groups of three
            rollouts.append(
                SimpleNamespace(completion_ids=tuple(ids), prompt=prompt, logps=logps, versions=tuple(versions))
            )
        gap = largest_gap(whole, rollouts)
        print(f"{kind}, version {version}: {equal_checksums} checksums equal, largest gap {gap:.1e} nats")
        assert gap < TOLERANCE
        assert versions_of(rollouts) == {version}


LAGS = {
    "on-policy": [],
    "async": ["lag.mode=async", "lag.max_steps=1"],
    "in flight": ["lag.mode=async", "lag.max_steps=2", "lag.in_flight=true", "rollout.max_new_tokens=60"],
}
OLDEST = {"on-policy": 0, "async": 1, "in flight": 2}
"""How many updates old a token may be."""
CASES = []
for lag, kind in itertools.product(LAGS, KINDS):
    # Servers are started for each case: one is enough where nobody asks for the slow ones.
    marks = [] if (lag, kind) == ("async", "gloo") else [pytest.mark.slow]
    CASES.append(pytest.param(lag, kind, marks=marks))


@pytest.mark.parametrize(("lag", "kind"), CASES)
def test_two_fsdp_ranks_train_with_a_server(tmp_path, monkeypatch, lag, kind):
    """Four updates; samples of the current weights, by the versions of their tokens, have the trainer's log-probs."""
    import rank_runs
    from training_runs import metrics_of

    monkeypatch.setattr(rank_runs, "MODULES", [])  # real processes for real servers
    trained = ["model.lora=null", "optimizer.lr=0.01"]
    if kind == "adapter":
        trained = ["model.lora={rank: 4}", "optimizer.lr=0.03"]
    words = [
        "rollout.backend=vllm_server",
        f"rollout.options={{transport: {kind}, kv_cache_gib: 0.1}}",
        "model.options={preset: tiny, heads: 2}",
        *trained,
        "train.steps=4",
        "train.eval_every=0",
        "train.record_rollouts=jsonl",
        "eval.at_start=false",
        "eval.at_end=false",
        "rollout.batch_sequences=16",
        "kl.0.reference=initial",
        *LAGS[lag],
    ]
    run = rank_runs.over(tmp_path / "run", "fsdp", *words)
    metrics = metrics_of(run)
    gaps = {step: value for (step, name), value in metrics.items() if name == "policy/behaviour_gap_max"}
    versions = versions_of_batches(run)
    print(f"{lag}, {kind}: versions {versions}, gaps {gaps}")
    assert sorted(gaps) == [1, 2, 3, 4]
    assert len(versions) == 4
    for current, drawn_by in enumerate(versions):
        age = current - min(drawn_by)
        assert max(drawn_by) <= current
        assert age <= OLDEST[lag]
        # An equal policy has equal log-probs; an older one, with this learning rate, has not.
        is_on_policy = drawn_by == {current}
        assert (gaps[current + 1] < GAP) == is_on_policy, (current, drawn_by, gaps)
        assert metrics[current + 1, "policy/staleness_max"] == age
    if lag != "on-policy":
        assert any(min(drawn_by) < current for current, drawn_by in enumerate(versions)), "none drawn ahead"


def versions_of_batches(run):
    """For each batch that was trained on, the versions by which its tokens were drawn."""
    versions = []
    for file in sorted((run.path / "rollouts").glob("batch-*.jsonl")):
        batch_versions = set()
        for line in file.read_text().splitlines():
            batch_versions.update(json.loads(line)["versions"])
        versions.append(batch_versions)
    return versions
