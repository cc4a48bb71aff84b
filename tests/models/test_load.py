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


def test_a_local_folder_is_loaded_on_the_cpu(folder):
    loaded = load(folder)
    assert loaded.device == torch.device("cpu")
    assert loaded.source == folder


def test_the_tokenizer_pads_on_the_left_with_the_end_token(folder):
    tokenizer = load(folder).tokenizer
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == 0


def test_a_tied_head_is_the_embedding(folder):
    loaded = load(folder)
    weight, bias = head_weights(loaded.model)
    assert bias is None
    assert weight is loaded.model.model.embed_tokens.weight
    assert weight.dtype == torch.float32


def assert_without_dropout(model):
    ids = torch.arange(12)[None]
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


def test_dropout_that_is_a_number_is_switched_off(folder):
    assert_without_dropout(load(folder).model)


def test_dropout_that_is_a_module_is_switched_off(tmp_path):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=64))
    assert_without_dropout(load(save(tmp_path, gpt2)).model)


@pytest.fixture(scope="module")
def adapted(folder):
    return load(folder, dtype="bfloat16", lora=LoraConfig(rank=2), gradient_checkpointing=True)


def test_only_an_adapter_is_trained(adapted):
    trained = [name for name, parameter in adapted.model.named_parameters() if parameter.requires_grad]
    assert trained
    assert [name for name in trained if "lora_" not in name] == []


def test_an_adapted_model_names_the_model_inside(adapted):
    assert adapted.causal is unwrap(adapted.model)
    assert isinstance(adapted.causal, LlamaForCausalLM)


def test_the_base_of_an_adapter_has_the_dtype_of_the_config(adapted):
    assert adapted.causal.lm_head.weight.dtype == torch.bfloat16


def test_gradient_checkpoints_are_switched_on_and_act(adapted):
    """Transformers checkpoints a model in training mode only."""
    assert adapted.causal.model.gradient_checkpointing
    assert adapted.model.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "./nowhere"}, r"model\.source: got './nowhere'.*no such folder"),
        ({"source": "./nowhere/SmolLM2-135M-Instruct"}, "`make smollm2` makes this folder"),
        ({"gguf_file": "model.gguf"}, r"model\.gguf_file: got 'model\.gguf'.*no such file"),
        ({"tokenizer": "./nowhere"}, r"model\.tokenizer: got './nowhere'"),
        ({"options": {"device_map": "auto"}}, r"model\.options\.device_map: not allowed"),
        ({"lora": LoraConfig(target_modules=["q_prj"])}, r"target_modules: got 'q_prj'.*did you mean 'q_proj'"),
        ({"lora": LoraConfig(target_modules=["lm_head"])}, r"target_modules: got 'lm_head'"),
    ],
    ids=[
        "source",
        "source that make smollm2 makes",
        "gguf_file",
        "tokenizer",
        "device_map",
        "unknown module",
        "head",
    ],
)
def test_each_mistake_names_its_key(folder, change, message):
    with pytest.raises(UserError, match=message):
        load(folder, **change)


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_cuda_without_a_gpu_is_refused(folder, without_gpu):
    with pytest.raises(UserError, match=r"model\.device: got 'cuda'.*no GPU"):
        load(folder, device="cuda")


def test_the_device_is_the_cpu_without_a_gpu(folder, without_gpu):
    assert load(folder, device="auto").device.type == "cpu"


def test_a_misspelled_folder_names_the_nearest(folder):
    with pytest.raises(UserError, match=rf"did you mean '{folder}'"):
        load(folder + "x")


def test_a_folder_without_weights_is_refused(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    LlamaConfig(**SMALL, **HEADS).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.source"):
        load(tmp_path)


def test_a_tokenizer_that_can_neither_pad_nor_end_is_refused(tmp_path):
    with pytest.raises(UserError, match="neither a padding nor an end token"):
        load(save(tmp_path, llama(), eos=None))


def test_what_the_hub_answers_is_said_in_one_line(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to the hub to load this file\nmore lines")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    monkeypatch.setattr(sources, "hub_answers", lambda: True)
    with pytest.raises(UserError, match=r"model\.source: got 'someone/some-model'.*couldn't connect") as error:
        load("someone/some-model")
    assert "more lines" not in str(error.value)


@pytest.fixture
def without_hub(monkeypatch, tmp_path):
    """No hub answers at port 9; names of folders are relative to ``tmp_path``, and the hub's cache is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    # The answer is asked for once in a process.
    sources.hub_answers.cache_clear()
    yield
    sources.hub_answers.cache_clear()


def test_without_a_hub_a_name_fails_at_once_unless_its_files_are_here(without_hub, folder):
    with pytest.raises(UserError, match=r"model\.source: got 'some/tiny'.*http://127.0.0.1:9 does not answer"):
        check_source(ModelConfig(source="some/tiny"))
    check_source(ModelConfig(source=folder))


def test_without_a_hub_a_name_is_compared_with_the_folders_here(without_hub, folder):
    Path("models/tiny").mkdir(parents=True)
    with pytest.raises(UserError, match=r"model\.tokenizer.*did you mean 'models/tiny'"):
        check_source(ModelConfig(source=folder, tokenizer="some/tiny"))


def test_without_a_hub_a_name_in_its_cache_is_available(without_hub):
    snapshot = Path("cache/models--some--tiny/snapshots/1f2e")
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert not sources.check_available("model.source", "some/tiny"), "no message"


@pytest.mark.parametrize(
    ("key", "model_class", "config_class", "scale"),
    [
        ("logit_scale", CohereForCausalLM, CohereConfig, 0.25),
        ("logits_scaling", GraniteForCausalLM, GraniteConfig, 8.0),
    ],
    ids=["Cohere", "Granite"],
)
def test_architectures_that_scale_the_logits_are_refused(tmp_path, key, model_class, config_class, scale):
    model = model_class(config_class(**SMALL, **HEADS, **{key: scale}))
    with pytest.raises(UserError, match=key):
        load(save(tmp_path, model))


def test_a_model_whose_log_probs_are_those_of_its_head_passes_the_check():
    check_log_probs(llama())


def test_a_head_that_changes_the_logits_is_found_by_its_numbers():
    """A cap of the logits that no key of the config names."""
    model = llama()
    linear_forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: torch.tanh(linear_forward(hidden))
    # Large logits, on which the cap acts.
    with torch.no_grad():
        model.lm_head.weight *= 20
    with pytest.raises(UserError, match="differ from the model's own"):
        check_log_probs(model)


def test_a_head_that_is_no_linear_layer_is_refused():
    model = llama()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UserError, match="head of LlamaForCausalLM is Sequential"):
        head_weights(model)


# --- GGUF files -------------------------------------------------------------------------------------------------------
def test_a_misspelled_gguf_file_names_the_nearest(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"no such format")
    with pytest.raises(UserError, match=r"got 'tny\.gguf'; did you mean 'tiny\.gguf'\? allowed: tiny\.gguf"):
        load(tmp_path, gguf_file="tny.gguf")


def test_a_file_of_another_format_is_no_gguf_file(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"no such format")
    with pytest.raises(UserError, match="not a readable GGUF file"):
        load(tmp_path, gguf_file="tiny.gguf")


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "tiny.gguf", "smollm")
    return load(folder, gguf_file="tiny.gguf")


def test_a_gguf_file_becomes_a_tied_model(from_gguf):
    assert from_gguf.model.lm_head.weight is from_gguf.model.model.embed_tokens.weight


def test_the_tokenizer_of_a_gguf_file_splits_as_the_file_says(from_gguf):
    assert from_gguf.tokenizer.tokenize("x  7") == ["x", "ĠĠ", "7"]
    assert from_gguf.tokenizer.model_max_length == 64


def test_a_model_from_a_gguf_file_can_be_trained(from_gguf):
    from_gguf.model(torch.arange(8)[None]).logits.logsumexp(-1).sum().backward()
    for name, parameter in from_gguf.model.named_parameters():
        assert parameter.grad is not None, name


def test_a_model_from_a_gguf_file_can_be_saved(from_gguf, tmp_path):
    from_gguf.model.save_pretrained(tmp_path)
    from_gguf.tokenizer.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert weights_hash(again.model) == weights_hash(from_gguf.model)
    assert again.tokenizer.tokenize("x  7") == ["x", "ĠĠ", "7"]


def byte_level():
    inner = Tokenizer(models.BPE(vocab={"x": 0, "Ġ": 1, "ĠĠ": 2, "7": 3}, merges=[("Ġ", "Ġ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="x")


@pytest.fixture(scope="module")
def fetch_smollm2():
    """The script that makes a folder of SmolLM2, as a module."""
    script = Path(__file__).parents[2] / "research" / "scripts" / "fetch_smollm2.py"
    spec = importlib.util.spec_from_file_location("fetch_smollm2", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_repaired_tokenizer_splits_digits_before_spaces_are_grouped(fetch_smollm2):
    repaired = byte_level()
    repair_pre_tokenizer(repaired, "smollm")
    fetch_smollm2.check_digits(repaired)


def test_a_tokenizer_that_was_not_repaired_is_found_by_its_digits(fetch_smollm2):
    plain = byte_level()
    assert plain.tokenize("x  7") == ["x", "Ġ", "Ġ", "7"]
    with pytest.raises(RunFailed, match="splits"):
        fetch_smollm2.check_digits(plain)


def test_an_unknown_pre_tokenizer_is_left_with_a_warning():
    with pytest.warns(UserWarning, match="pre-tokenizer 'llama-bpe'"):
        repair_pre_tokenizer(byte_level(), "llama-bpe")


def test_fetching_smollm2_never_replaces_a_folder_of_something_else(fetch_smollm2, tmp_path):
    with pytest.raises(UserError, match=r"holds no model\.safetensors"):
        fetch_smollm2.fetch(tmp_path)


def test_fetching_smollm2_again_does_nothing(fetch_smollm2, tmp_path, capsys):
    (tmp_path / "model.safetensors").touch()
    fetch_smollm2.fetch(tmp_path)
    assert "already" in capsys.readouterr().err


def test_fetching_smollm2_from_another_file_leaves_no_part(fetch_smollm2, tmp_path):
    (tmp_path / "file.gguf").write_bytes(b"not it")
    target = tmp_path / "models" / "smol"
    with pytest.raises(UserError, match="sha256"):
        fetch_smollm2.fetch(target, gguf=tmp_path / "file.gguf")
    assert not target.exists()
    assert list(target.parent.iterdir()) == []


# --- numbers in the files of a model ------------------------------------------------------------------------------
def copy_with_settings(folder, copy, file, change):
    """A copy of a model's folder in which one of its JSON files has other settings."""
    shutil.copytree(folder, copy)
    content = {}
    if (copy / file).is_file():
        content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps({**content, **change}))
    return copy


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
    """Within 10 seconds of processor time: ten million layers would take hours to build."""
    changed = copy_with_settings(folder, tmp_path / "model", file, change)
    for check in (lambda: load(changed), lambda: check_source(ModelConfig(source=str(changed)))):
        with cpu_limit(10), pytest.raises(UserError, match=rf"^model\.source: .* has in {file} .*{message}") as error:
            check()
        assert "\n" not in str(error.value)


def test_token_ids_that_are_numbers_lists_of_them_or_none_are_allowed(folder, tmp_path):
    token_ids = {"eos_token_id": [0, 1], "bos_token_id": None}
    changed = copy_with_settings(folder, tmp_path / "model", "config.json", token_ids)
    assert load(changed).model.config.eos_token_id == [0, 1]


@pytest.mark.parametrize(
    ("name", "value"), [("block_count", 2**32 - 1), ("feed_forward_length", 2**31), ("embedding_length", 2**31)]
)
@pytest.mark.parametrize("has_tokenizer", [False, True], ids=["its own tokenizer", "another tokenizer"])
def test_the_header_of_a_gguf_file_is_looked_at_before_the_model_is_built(
    tmp_path, monkeypatch, name, value, has_tokenizer
):
    import gguf

    add = getattr(gguf.GGUFWriter, f"add_{name}")
    monkeypatch.setattr(gguf.GGUFWriter, f"add_{name}", lambda writer, _: add(writer, value))
    write_gguf(tmp_path / "tiny.gguf", "smollm")
    other_tokenizer = None
    if has_tokenizer:
        tokenizer().save_pretrained(tmp_path / "words")
        other_tokenizer = str(tmp_path / "words")
    with (
        cpu_limit(10),
        pytest.raises(UserError, match=rf"model\.gguf_file: tiny\.gguf has {name}: got {value}"),
    ):
        load(tmp_path, gguf_file="tiny.gguf", tokenizer=other_tokenizer)


def test_a_folder_without_a_model_or_a_tokenizer_is_refused_before_loading(folder, tmp_path):
    with pytest.raises(UserError, match=r"it holds no config\.json"):
        check_source(ModelConfig(source=str(tmp_path)))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    check_source(ModelConfig(source=str(tmp_path)))
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match=r"holds none of tokenizer\.json.*model\.tokenizer names another"):
        check_source(ModelConfig(source=str(tmp_path)))
    # Another tokenizer, or a GGUF file, which has its own.
    check_source(ModelConfig(source=str(tmp_path), tokenizer="pocket"))
    check_source(ModelConfig(source=str(tmp_path), gguf_file="x.gguf"))


def test_a_message_that_ends_with_a_colon_goes_on():
    assert sources.first_line(ValueError("one of:\n(1) a file\n(2) an id\n")) == "one of: (1) a file (2) an id"
    assert sources.first_line(ValueError("bad file\nat line 3")) == "bad file"
    assert sources.first_line(ValueError()) == "ValueError"


def test_an_adapter_on_a_model_without_linear_layers_is_refused(tmp_path):
    config = GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    source = save(tmp_path, GPT2LMHeadModel(config))
    with pytest.raises(UserError, match=r"model\.lora: .*GPT2LMHeadModel has no linear layer"):
        load(source, lora=LoraConfig(rank=2))
