"""The sampler of a run: which backend draws, its options, the GPUs of its servers, and what it cannot serve."""

from pathlib import Path

import pytest

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts import Sampler
from kl_comedy.rollouts.engines.options import JOB_URLS, HFServerOptions, VLLMServerOptions
from kl_comedy.rollouts.hf import HFOptions
from kl_comedy.rollouts.sampler import ENGINE_BESIDE, capabilities_of, sampler_name

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
VLLM = "rollout.backend=vllm_server"
HF = "rollout.backend=hf_server"


def sampler(*overrides):
    return Sampler.of(load_config(TINY, overrides))


@pytest.mark.parametrize(
    ("overrides", "name", "options", "beside"),
    [
        ([], "hf", HFOptions, False),
        (["lag.mode=replayed", "lag.steps=1"], "hf", HFOptions, False),
        (["lag.mode=async"], "hf_server", HFServerOptions, True),
        (["rollout.backend=vllm", "lag.mode=async"], "vllm_server", VLLMServerOptions, True),
        ([VLLM], "vllm_server", VLLMServerOptions, True),
        ([HF, "lag.mode=async"], "hf_server", HFServerOptions, True),
    ],
)
def test_the_backend_that_draws(overrides, name, options, beside):
    drawn_by = sampler(*overrides)
    assert drawn_by.name == name
    assert type(drawn_by.options) is options
    assert drawn_by.beside == beside
    assert drawn_by.capabilities == capabilities_of(name)
    assert drawn_by.builder is ROLLOUTS.get(name).fn
    assert (drawn_by.server_options is not None) == beside


@pytest.mark.parametrize(("backend", "engine"), ENGINE_BESIDE.items(), ids=ENGINE_BESIDE)
def test_the_engine_beside_is_one_and_takes_weights_between_tokens(backend, engine):
    assert capabilities_of(backend).in_trainer_ranks
    assert not capabilities_of(engine).in_trainer_ranks
    assert capabilities_of(engine).updates_between_tokens


def test_options_are_those_of_the_backend_that_draws():
    async_options = ["lag.mode=async", "rollout.options={threads: 2}"]
    assert sampler(*async_options).options.threads == 2
    with pytest.raises(UserError, match=r"rollout\.options\.threads: no such key"):
        sampler("rollout.options={threads: 2}")


def test_a_wrong_option_does_not_keep_a_config_from_being_read():
    config = load_config(TINY, ["rollout.options={threads: 2}"])
    assert sampler_name(config) == "hf"


def test_a_backend_without_a_schema_has_no_options(monkeypatch):
    # The entry that is registered below is gone after the test.
    monkeypatch.setattr(ROLLOUTS, "_entries", dict(ROLLOUTS._entries))

    @ROLLOUTS.register("plain", source="tests", summary="A backend that declares nothing.")
    def build_plain(config, *, loaded):
        raise NotImplementedError

    drawn_by = sampler("rollout.backend=plain", "rollout.options={anything: 1}")
    assert drawn_by.options is None
    assert drawn_by.server_options is None
    assert not drawn_by.beside
    assert drawn_by.transport_on(["0"]) is None
    assert drawn_by.server_gpus(["0"]) == []


def test_the_servers_of_a_cluster_job_are_used_where_the_config_names_none(monkeypatch):
    monkeypatch.setenv(JOB_URLS, "http://a:1,http://b:2")
    drawn_by = sampler(HF, "rollout.options={servers: 3}")
    assert drawn_by.options.urls == ()
    assert drawn_by.options.servers == 3
    assert drawn_by.server_options.urls == ("http://a:1", "http://b:2")
    assert drawn_by.server_gpus(["0", "1"]) == []
    named = sampler(HF, "rollout.options={urls: ['http://c:3']}")
    assert named.server_options.urls == ("http://c:3",)


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        ([], 1, []),
        (["lag.mode=async"], 1, []),
        (["lag.mode=async"], 8, ["1"]),
        (["train.strategy=fsdp", "train.devices=4", VLLM, "rollout.options={servers: 4}"], 8, ["4", "5", "6", "7"]),
        ([VLLM, "rollout.options={servers: 2, tensor_parallel_size: 2}"], 6, ["1,2", "3,4"]),
        ([VLLM, "rollout.options={servers: 2, gpus: ['0', '1']}"], 2, ["0", "1"]),
        ([VLLM, "rollout.options={urls: ['http://a:1']}"], 2, []),
    ],
)
def test_each_server_gets_its_gpus(overrides, gpus, expected):
    assert sampler(*overrides).server_gpus([str(n) for n in range(gpus)]) == expected


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        ([], 1, []),
        (["lag.mode=async"], 1, []),
        (["lag.mode=async"], 8, ["GPU-1"]),
        (
            ["train.strategy=fsdp", "train.devices=4", VLLM, "rollout.options={servers: 4}"],
            8,
            ["GPU-4", "GPU-5", "GPU-6", "GPU-7"],
        ),
        ([VLLM, "rollout.options={servers: 2, tensor_parallel_size: 2}"], 6, ["GPU-1,GPU-2", "GPU-3,GPU-4"]),
        ([VLLM, "rollout.options={servers: 2, gpus: ['0', '1']}"], 2, ["0", "1"]),
        ([VLLM, "rollout.options={urls: ['http://a:1']}"], 2, []),
    ],
)
def test_gpus_keep_their_uuids_and_those_that_the_config_names_their_names(overrides, gpus, expected):
    """CUDA_VISIBLE_DEVICES of a cluster may hold UUIDs, which a server's own variable must repeat."""
    assert sampler(*overrides).server_gpus([f"GPU-{n}" for n in range(gpus)]) == expected


@pytest.mark.parametrize(
    ("overrides", "gpus", "share"),
    [
        ([VLLM], 1, 0.4),
        ([VLLM, "lag.mode=async"], 1, 0.4),
        ([VLLM, "rollout.options={gpu_memory_utilization: 0.2}"], 1, 0.2),
        ([VLLM], 2, None),
        ([VLLM, "rollout.options={gpus: ['1']}", "train.strategy=fsdp", "train.devices=2"], 2, 0.4),
        ([VLLM, "rollout.options={gpus: ['1']}"], 2, None),
        ([VLLM, "rollout.options={urls: ['http://a:1']}"], 1, None),
        ([VLLM], 0, None),
        ([HF], 1, None),
    ],
)
def test_a_vllm_server_on_a_gpu_of_the_trainer_leaves_it_memory(overrides, gpus, share):
    rollout = sampler(*overrides).rollout_on([str(n) for n in range(gpus)])
    assert rollout.options.get("gpu_memory_utilization") == share


@pytest.mark.parametrize(
    ("overrides", "gpus", "transport"),
    [
        ([], 1, None),
        ([HF], 1, "gloo"),
        ([VLLM], 0, "gloo"),
        ([VLLM], 1, "ipc"),
        ([VLLM], 8, "nccl"),
        ([VLLM, "rollout.options={servers: 2, gpus: ['0', '1']}"], 8, "gloo"),
        ([VLLM, "model.lora={rank: 2}"], 8, "adapter"),
        ([VLLM, "rollout.options={urls: ['http://a:1']}", "model.lora={rank: 2}"], 8, "folder"),
    ],
)
def test_weights_travel_by_what_the_gpus_allow(overrides, gpus, transport):
    assert sampler(*overrides).transport_on([str(n) for n in range(gpus)]) == transport


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.backend=replay", "rollout.options={path: a}", "lag.mode=replayed", "lag.steps=1"],
            r"lag\.mode: got 'replayed'; allowed: on_policy with rollout\.backend replay .*their age is fixed",
        ),
        (
            ["rollout.backend=replay", "rollout.options={path: a}", "lag.mode=async"],
            r"lag\.mode: got 'async'; allowed: on_policy with rollout\.backend replay",
        ),
        (
            ["lag.mode=async", "lag.in_flight=true", "lag.max_steps=1", "rollout.options={loop: library}"],
            r"lag\.in_flight: got True; allowed: false with rollout\.backend hf .*only, with loop: library",
        ),
        (
            ["rollout.backend=vllm", "train.strategy=ddp", "train.devices=2"],
            r"rollout\.backend: got 'vllm'; .*allowed: .*hf.*each draws a part of a batch",
        ),
    ],
)
def test_what_the_sampler_cannot_serve_is_refused_when_the_config_is_read(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(TINY, overrides)
