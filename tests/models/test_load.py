"""Loading: what works, and the one clear error for each thing that does not."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoTokenizer,
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from commands import cpu_limit
from kl_comedy.config.schema import LoraConfig, ModelConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import head_weights, sources, unwrap, weights_hash
from kl_comedy.models.gguf import repair_pre_tokenizer
from kl_comedy.models.load import check_log_probs
from kl_comedy.models.sources import check_source
from saved_models import HEADS, SMALL, llama, load, save, tokenizer, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"), llama(attention_dropout=0.3, tie_word_embeddings=True))


def test_a_local_folder_loads_left_padded_tied_and_without_dropout(folder, tmp_path):
    loaded = load(folder)
    assert loaded.device == torch.device("cpu") and loaded.source == folder
    assert loaded.tokenizer.padding_side == "left"
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id == 0
    weight, bias = head_weights(loaded.model)
    assert bias is None and weight is loaded.model.model.embed_tokens.weight
    assert weight.dtype == torch.float32
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=64))
    ids = torch.arange(12)[None]
    for model in (loaded.model, load(save(tmp_path, gpt2)).model):  # dropout as numbers, and as modules
        assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


def test_dtype_lora_and_checkpointing(folder):
    loaded = load(folder, dtype="bfloat16", lora=LoraConfig(rank=2), gradient_checkpointing=True)
    trained = [name for name, p in loaded.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert loaded.causal is unwrap(loaded.model) and isinstance(loaded.causal, LlamaForCausalLM)
    assert loaded.causal.lm_head.weight.dtype == torch.bfloat16
    assert loaded.model.training and loaded.causal.model.gradient_checkpointing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "./nowhere"}, r"model\.source: got './nowhere'.*no such folder"),
        ({"source": "./nowhere/SmolLM2-135M-Instruct"}, "`make smollm2` makes this folder"),
        ({"options": {"gguf_file": "model.gguf"}}, r"model\.options\.gguf_file: got 'model\.gguf'.*no such file"),
        ({"tokenizer": "./nowhere"}, r"model\.tokenizer: got './nowhere'"),
        ({"options": {"device_map": "auto"}}, r"model\.options\.device_map: not allowed"),
        ({"lora": LoraConfig(target_modules=["q_prj"])}, r"target_modules: got 'q_prj'.*did you mean 'q_proj'"),
        ({"lora": LoraConfig(target_modules=["lm_head"])}, r"target_modules: got 'lm_head'"),
    ],
)
def test_each_mistake_names_its_key(folder, change, message):
    with pytest.raises(UserError, match=message):
        load(folder, **change)


def test_cuda_without_a_gpu(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"model\.device: got 'cuda'.*no GPU"):
        load(folder, device="cuda")
    assert load(folder, device="auto").device.type == "cpu"


def test_sources_that_cannot_be_loaded(monkeypatch, folder, tmp_path):
    with pytest.raises(UserError, match=rf"did you mean '{folder}'"):
        load(folder + "x")
    tokenizer().save_pretrained(tmp_path / "empty")
    LlamaConfig(**SMALL, **HEADS).save_pretrained(tmp_path / "empty")
    with pytest.raises(UserError, match=r"model\.source"):
        load(tmp_path / "empty")
    with pytest.raises(UserError, match="neither a padding nor an end token"):
        load(save(tmp_path / "endless", llama(), eos=None))

    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to the hub to load this file\nmore lines")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    monkeypatch.setattr(sources, "hub_answers", lambda: True)
    with pytest.raises(UserError, match=r"model\.source: got 'someone/some-model'.*couldn't connect") as error:
        load("someone/some-model")
    assert "more lines" not in str(error.value)


def test_without_a_hub_a_name_fails_at_once_unless_its_files_are_here(monkeypatch, folder, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    sources.hub_answers.cache_clear()
    with pytest.raises(UserError, match=r"model\.source: got 'some/tiny'.*http://127.0.0.1:9 does not answer"):
        check_source(ModelConfig(source="some/tiny"))
    check_source(ModelConfig(source=folder))
    Path("models/tiny").mkdir(parents=True)
    with pytest.raises(UserError, match=r"model\.tokenizer.*did you mean 'models/tiny'"):
        check_source(ModelConfig(source=folder, tokenizer="some/tiny"))
    (tmp_path / "cache/models--some--tiny/snapshots/1f2e").mkdir(parents=True)
    (tmp_path / "cache/models--some--tiny/snapshots/1f2e/config.json").write_text("{}")
    assert not sources.check_available("model.source", "some/tiny")
    sources.hub_answers.cache_clear()


def test_architectures_that_change_the_logits_are_refused(tmp_path):
    scaled = {
        "logit_scale": CohereForCausalLM(CohereConfig(**SMALL, **HEADS, logit_scale=0.25)),
        "logits_scaling": GraniteForCausalLM(GraniteConfig(**SMALL, **HEADS, logits_scaling=8.0)),
    }
    for key, model in scaled.items():
        with pytest.raises(UserError, match=key):
            load(save(tmp_path / key, model))
    model = llama()
    check_log_probs(model)
    linear_forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: torch.tanh(linear_forward(hidden))  # no config key says so
    with torch.no_grad():
        model.lm_head.weight *= 20
    with pytest.raises(UserError, match="differ from the model's own"):
        check_log_probs(model)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UserError, match="head of LlamaForCausalLM is Sequential"):
        head_weights(model)


def test_a_gguf_file_becomes_a_tied_trainable_savable_model(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"no such format")
    with pytest.raises(UserError, match=r"got 'tny\.gguf'; allowed: tiny\.gguf; did you mean"):
        load(tmp_path, options={"gguf_file": "tny.gguf"})
    with pytest.raises(UserError, match="not a readable GGUF file"):
        load(tmp_path, options={"gguf_file": "tiny.gguf"})
    write_gguf(tmp_path / "tiny.gguf", "smollm")
    loaded = load(tmp_path, options={"gguf_file": "tiny.gguf"})
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.tokenizer.tokenize("x  7") == ["x", "ĠĠ", "7"] and loaded.tokenizer.model_max_length == 64
    ids = torch.arange(8)[None]
    loaded.model(ids).logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in loaded.model.parameters())
    loaded.model.save_pretrained(tmp_path / "saved")
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert weights_hash(again.model) == weights_hash(loaded.model)
    assert again.tokenizer.tokenize("x  7") == ["x", "ĠĠ", "7"]


def byte_level():
    inner = Tokenizer(models.BPE(vocab={"x": 0, "Ġ": 1, "ĠĠ": 2, "7": 3}, merges=[("Ġ", "Ġ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="x")


def test_fetching_smollm2_never_replaces_a_folder_nor_leaves_a_part(tmp_path, capsys):
    script = Path(__file__).parents[2] / "research" / "scripts" / "fetch_smollm2.py"
    spec = importlib.util.spec_from_file_location("fetch_smollm2", script)
    fetch_smollm2 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch_smollm2)
    plain, repaired = byte_level(), byte_level()
    repair_pre_tokenizer(repaired, "smollm")  # splits digits before spaces are grouped
    assert plain.tokenize("x  7") == ["x", "Ġ", "Ġ", "7"]
    fetch_smollm2.check_digits(repaired)
    with pytest.raises(RunFailed, match="splits"):
        fetch_smollm2.check_digits(plain)
    with pytest.warns(UserWarning, match="pre-tokenizer 'llama-bpe'"):
        repair_pre_tokenizer(plain, "llama-bpe")
    target = tmp_path / "made"
    target.mkdir()
    with pytest.raises(UserError, match=r"holds no model\.safetensors"):
        fetch_smollm2.fetch(target)
    (target / "model.safetensors").touch()
    fetch_smollm2.fetch(target)
    assert "already" in capsys.readouterr().err
    (tmp_path / "file.gguf").write_bytes(b"not it")
    target = tmp_path / "models" / "smol"
    with pytest.raises(UserError, match="sha256"):
        fetch_smollm2.fetch(target, gguf=tmp_path / "file.gguf")
    assert not target.exists() and not list(target.parent.iterdir())


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"num_hidden_layers": 10_000_000}, r"num_hidden_layers: got 10000000; allowed: at most 1000"),
        ("config.json", {"num_hidden_layers": -1}, r"num_hidden_layers: got -1"),
        ("config.json", {"intermediate_size": 10**9}, r"intermediate_size: got 1000000000; allowed: at most 1048576"),
        ("config.json", {"text_config": {"n_layer": 10**7}}, r"text_config\.n_layer: got 10000000"),
        ("config.json", {"eos_token_id": "</s>"}, r"eos_token_id: got '</s>'; allowed: a whole number, a list"),
        ("config.json", {"eos_token_id": [0, "</s>"]}, r"eos_token_id: got \[0, '</s>'\]"),
        ("generation_config.json", {"eos_token_id": "</s>"}, r"eos_token_id: got '</s>'"),
        ("generation_config.json", {"pad_token_id": True}, r"pad_token_id: got True"),
    ],
)
def test_numbers_of_a_models_config_are_looked_at_before_it_is_built(folder, tmp_path, file, change, message):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    content = json.loads((copy / file).read_text()) if (copy / file).is_file() else {}
    (copy / file).write_text(json.dumps({**content, **change}))
    for check in (lambda: load(copy), lambda: check_source(ModelConfig(source=str(copy)))):
        with cpu_limit(10), pytest.raises(UserError, match=rf"^model\.source: .* has in {file} .*{message}") as error:
            check()
        assert "\n" not in str(error.value)


def test_token_ids_that_are_numbers_lists_of_them_or_none_are_allowed(folder, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**content, "eos_token_id": [0, 1], "bos_token_id": None}))
    assert load(copy).model.config.eos_token_id == [0, 1]


@pytest.mark.parametrize(
    ("name", "value"), [("block_count", 2**32 - 1), ("feed_forward_length", 2**31), ("embedding_length", 2**31)]
)
def test_the_header_of_a_gguf_file_is_looked_at_before_the_model_is_built(tmp_path, monkeypatch, name, value):
    import gguf

    add = getattr(gguf.GGUFWriter, f"add_{name}")
    monkeypatch.setattr(gguf.GGUFWriter, f"add_{name}", lambda writer, _: add(writer, value))
    write_gguf(tmp_path / "tiny.gguf", "smollm")
    tokenizer().save_pretrained(tmp_path / "words")
    for other in (None, str(tmp_path / "words")):
        with (
            cpu_limit(10),
            pytest.raises(UserError, match=rf"model\.options\.gguf_file: tiny\.gguf has {name}: got {value}"),
        ):
            load(tmp_path, options={"gguf_file": "tiny.gguf"}, tokenizer=other)
