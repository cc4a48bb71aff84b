"""The transformers backend on tiny random models: what it draws is what the learner differentiates."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Fast

from kl_comedy.config.schema import LoraConfig, RolloutConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import LoadedModel
from kl_comedy.models.lora import add_lora
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts import Sampling, build_hf
from passes import token_pass

LETTERS = "abcdefghij"
VOCAB = {token: n for n, token in enumerate(["<e>", *LETTERS])}


def tokenizer():
    inner = Tokenizer(models.WordLevel(VOCAB, unk_token="<e>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    made = Fast(tokenizer_object=inner, eos_token="<e>")
    made.pad_token, made.padding_side = "<e>", "left"  # the trap: padding is the end token
    return made


def llama(dtype=torch.float32, seed=0, spread=0.5):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def load(model=None):
    return LoadedModel(model=model or llama(), tokenizer=tokenizer(), device=torch.device("cpu"), source="test")


def prompt(text):
    ids = tuple(VOCAB[letter] for letter in text)
    return Prompt(problem=Problem(id=text, text=text, answer=""), text=text, token_ids=ids)


PROMPTS = [prompt(text) for text in ("abc", "j", "hgfedc", "abc")]


def draw(loaded=None, prompts=PROMPTS, *, group_size=3, seed=0, batch=256, **sampling):
    backend = build_hf(RolloutConfig(batch_sequences=batch), loaded=loaded or load())
    settings = Sampling(**{"temperature": 1.0, "max_new_tokens": 6, **sampling})
    return backend.generate(prompts, group_size=group_size, sampling=settings, seed=seed)


def trainer_logps(model, rollouts, temperature):
    """What the learner computes for the same tokens, in one padded batch."""
    P = max(len(r.prompt.token_ids) for r in rollouts)
    T = max(len(r.completion_ids) for r in rollouts)
    prompt_ids, prompt_mask = torch.zeros(len(rollouts), P, dtype=torch.long), torch.zeros(len(rollouts), P)
    ids, mask = torch.zeros(len(rollouts), T, dtype=torch.long), torch.zeros(len(rollouts), T, dtype=torch.bool)
    for n, r in enumerate(rollouts):
        prompt_ids[n, P - len(r.prompt.token_ids) :] = torch.tensor(r.prompt.token_ids)
        prompt_mask[n, P - len(r.prompt.token_ids) :] = 1
        ids[n, : len(r.completion_ids)] = torch.tensor(r.completion_ids)
        mask[n, : len(r.completion_ids)] = True
    with torch.no_grad():
        scored = token_pass(
            model,
            prompt_ids_BP=prompt_ids,
            prompt_mask_BP=prompt_mask,
            ids_BT=ids,
            mask_BT=mask,
            temperature=temperature,
            chunk_elements=10**6,
        )
    return [row[: len(r.completion_ids)].tolist() for row, r in zip(scored.logp_BT, rollouts, strict=True)]


def gpt2():
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=len(VOCAB),
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.9])
@pytest.mark.parametrize("make", [llama, gpt2, lambda: llama(torch.float64)], ids=["llama", "gpt2", "float64"])
def test_the_samplers_log_probs_are_the_trainers(make, temperature):
    model = make()
    rollouts = draw(load(model), temperature=temperature, group_size=8)
    for rollout, expected in zip(rollouts, trainer_logps(model, rollouts, temperature), strict=True):
        assert rollout.logps == pytest.approx(expected, abs=1e-5)


def test_order_groups_versions_and_texts():
    backend = build_hf(RolloutConfig(batch_sequences=5), loaded=load())
    backend.update_weights(7)
    rollouts = backend.generate(PROMPTS, group_size=3, sampling=Sampling(temperature=1.0, max_new_tokens=6), seed=0)
    assert [r.group_id for r in rollouts] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(r.prompt is PROMPTS[r.group_id] for r in rollouts)
    for r in rollouts:
        assert r.versions == (7,) * len(r.completion_ids) and len(r.logps) == len(r.completion_ids)
        assert r.text == "".join(LETTERS[n - 1] for n in r.completion_ids if n)
        assert (r.completion_ids[-1] == 0) is (r.stop_reason == "eos")
        assert 0 not in r.completion_ids[:-1]
        assert r.stop_reason == "eos" or len(r.completion_ids) == 6
    assert {r.stop_reason for r in rollouts} == {"eos", "length"}
    assert len({r.completion_ids for r in rollouts}) > 6, "a group is not one completion repeated"


def test_a_seed_decides_everything_and_the_global_state_is_left_alone():
    loaded = load()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = draw(loaded, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(999)
    assert draw(loaded, seed=5) == first
    assert draw(loaded, seed=6) != first


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=st.lists(st.text(LETTERS, min_size=1, max_size=9), min_size=1, max_size=4),
    batch=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_padding_and_batching_change_neither_greedy_tokens_nor_log_probs(texts, batch, temperature):
    loaded, prompts = _shared(), [prompt(text) for text in texts]
    together = draw(loaded, prompts, group_size=1, batch=batch, temperature=temperature)
    if temperature == 0:
        alone = [draw(loaded, [p], group_size=1, temperature=0.0)[0] for p in prompts]
        assert [r.completion_ids for r in together] == [r.completion_ids for r in alone]
    for r in together:
        assert r.logps == pytest.approx(trainer_logps(loaded.model, [r], 1.0)[0], abs=5e-5)


@functools.cache
def _shared():
    return load()


def test_greedy_takes_the_likeliest_token_with_the_untempered_log_prob():
    model = llama()
    rollouts = draw(load(model), temperature=0.0, group_size=2)
    assert rollouts[0] == rollouts[1]
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt.token_ids + rollout.completion_ids])
        logp = model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].detach().log_softmax(-1)
        assert rollout.completion_ids == tuple(logp.argmax(-1).tolist())
        assert rollout.logps == pytest.approx(logp.max(-1).values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("truncation", "truncated"),
    [
        ({"top_k": 2}, lambda p: p >= p.topk(2).values[..., -1:]),
        ({"min_p": 0.3}, lambda p: p >= 0.3 * p.max(-1, keepdim=True).values),
        ({"top_p": 0.6}, lambda p: _nucleus(p, 0.6)),
    ],
)
def test_truncated_sampling_reports_the_truncated_distribution(truncation, truncated):
    model = llama()
    for rollout in draw(load(model), temperature=0.8, group_size=6, **truncation):
        ids = torch.tensor([rollout.prompt.token_ids + rollout.completion_ids])
        logits = model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].detach() / 0.8
        allowed = truncated(logits.softmax(-1))
        logp = logits.masked_fill(~allowed, float("-inf")).log_softmax(-1)
        chosen = logp.gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
        assert rollout.logps == pytest.approx(chosen.tolist(), abs=1e-5)


def _nucleus(p, mass):
    """The likeliest tokens up to and including the one with which their mass reaches ``mass``."""
    values, order = p.sort(-1, descending=True)
    keep = values.cumsum(-1) - values < mass
    return torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, keep)


def test_sampled_frequencies_are_the_policys():
    """2000 first tokens against the exact distribution: chi-square, false alarm about 1 in 1000."""
    model = llama(spread=0.2)
    rollouts = draw(load(model), [prompt("abc")], group_size=2000, batch=2000, max_new_tokens=1, temperature=0.7)
    with torch.no_grad():
        p = (model(torch.tensor([prompt("abc").token_ids])).logits[0, -1] / 0.7).softmax(-1).double()
    counts = torch.bincount(torch.tensor([r.completion_ids[0] for r in rollouts]), minlength=len(VOCAB)).double()
    chi2 = float(((counts - 2000 * p) ** 2 / (2000 * p)).sum())
    assert chi2 < 29.6, "10 degrees of freedom"


NASTY = {
    "do_sample": True,
    "top_k": 1,
    "top_p": 0.1,
    "min_p": 0.9,
    "temperature": 0.01,
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [1, 2, 3],
    "begin_suppress_tokens": [4],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 6,
    "bad_words_ids": [[7]],
    "min_new_tokens": 6,
    "typical_p": 0.1,
    "epsilon_cutoff": 0.5,
    "eta_cutoff": 0.5,
    "num_beams": 1,
    "max_length": 2,
    "sequence_bias": [[[8], -10.0]],
    "num_return_sequences": 1,
    "max_time": 1e-9,
    "stop_strings": ["a"],
    "exponential_decay_length_penalty": [1, 9.0],
}


def test_what_a_checkpoint_ships_for_generation_changes_nothing():
    model = llama()
    expected = draw(load(model))
    nasty = GenerationConfig(eos_token_id=0, **NASTY)
    model.generation_config = nasty
    assert draw(load(model)) == expected
    assert model.generation_config is nasty and nasty.top_k == 1, "and it is put back"
    assert len({r.completion_ids for r in expected}) > 6


def test_the_test_above_would_notice():
    model = llama()
    model.generation_config = GenerationConfig(eos_token_id=0, do_sample=True, top_k=1)
    ids = torch.tensor([prompt("abc").token_ids] * 8)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, pad_token_id=0)
    assert len({tuple(row) for row in out.tolist()}) == 1


def test_every_end_token_of_the_model_ends_a_completion():
    model = llama()
    model.generation_config.eos_token_id = [3, 4]
    rollouts = draw(load(model), group_size=10, max_new_tokens=12)
    ended = [r for r in rollouts if r.stop_reason == "eos"]
    assert {r.completion_ids[-1] for r in ended} == {0, 3, 4}
    assert all(not {0, 3, 4} & set(r.completion_ids[:-1]) for r in rollouts)
    for r, expected in zip(rollouts, trainer_logps(model, rollouts, 1.0), strict=True):
        assert r.logps == pytest.approx(expected, abs=1e-5)


def test_stop_strings_cut_ids_log_probs_and_text_alike():
    model = llama()
    free = draw(load(model), group_size=12, max_new_tokens=12)
    pair = max((a + b for a in LETTERS for b in LETTERS if a != b), key=lambda s: sum(s in r.text[:-2] for r in free))
    stopped = draw(load(model), group_size=12, max_new_tokens=12, stop=(pair,))
    cut = [r for r in stopped if r.stop_reason == "stop"]
    assert cut, "the commonest pair of the free run occurs"
    for r in stopped:
        assert len(r.logps) == len(r.completion_ids) == len(r.versions)
        assert r.text.endswith(pair) if r.stop_reason == "stop" else pair not in r.text
        assert pair not in r.text[:-1]
    for r, expected in zip(stopped, trainer_logps(model, stopped, 1.0), strict=True):
        assert r.logps == pytest.approx(expected, abs=1e-5)


def test_modes_are_restored_and_no_gradient_state_is_left():
    model = llama()
    model.train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    draw(load(model))
    assert [m.training for m in model.modules()] == modes
    loss = model(torch.arange(5)[None]).logits.sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_lora_policy_samples_with_its_adapter_on():
    model = add_lora(llama(), LoraConfig(rank=2))
    loaded = load(model)
    fresh = draw(loaded)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    rollouts = draw(loaded)
    assert rollouts != fresh
    for r, expected in zip(rollouts, trainer_logps(model, rollouts, 1.0), strict=True):
        assert r.logps == pytest.approx(expected, abs=1e-5)


def test_gradient_checkpointing_and_train_mode_change_nothing():
    model = llama()
    expected = draw(load(model))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    assert draw(load(model)) == expected


def test_new_weights_are_sampled_from_at_once():
    model = llama()
    before = draw(load(model))
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert draw(load(model)) != before


def test_what_cannot_be_sampled_is_told():
    with pytest.raises(UserError, match=r"max_new_tokens: got 60; allowed: up to 58.*longest prompt has 6 tokens"):
        draw(max_new_tokens=60)
    with pytest.raises(UserError, match="a prompt is empty"):
        draw(prompts=[dataclasses.replace(PROMPTS[0], token_ids=())])
    with pytest.raises(UserError, match="group_size"):
        draw(group_size=0)
    assert draw(prompts=[]) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_fail_the_run(temperature):
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RunFailed, match="finite"):
        draw(load(model), temperature=temperature)
    assert model.generation_config.eos_token_id == 0


def test_a_real_model_samples_what_the_trainer_computes():
    """SmolLM2-135M, where ``make smollm2`` has made it: log-probs agree in float32, and it knows its capital."""
    from kl_comedy.config.schema import ModelConfig
    from kl_comedy.models import load_model
    from kl_comedy.models.sources import SMOLLM2_FOLDER

    folder = Path(__file__).parents[2] / SMOLLM2_FOLDER
    if not (folder / "model.safetensors").is_file():
        pytest.skip("no SmolLM2 folder; `make smollm2` makes it")
    loaded = load_model(ModelConfig(source=str(folder), device="cpu"))
    texts = ["The capital of France is", "2 + 3 = 5\n4 + 1 ="]
    prompts = [
        Prompt(problem=Problem(id=t, text=t, answer=""), text=t, token_ids=tuple(loaded.tokenizer(t).input_ids))
        for t in texts
    ]
    rollouts = draw(loaded, prompts, group_size=2, temperature=0.7, stop=("\n",))
    for rollout, expected in zip(rollouts, trainer_logps(loaded.model, rollouts, 0.7), strict=True):
        assert rollout.logps == pytest.approx(expected, abs=2e-4)
    assert "Paris" in draw(loaded, prompts[:1], group_size=1, temperature=0.0)[0].text


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("stop", [(), ("ab", "c")], ids=["eos", "stop"])
def test_our_loop_draws_the_librarys_greedy_completions(make, stop):
    """Shared prompts and rows that leave: the tokens, reasons and log-probs of ``generate``."""
    model = make()
    drawn = []
    for loop in ("auto", "library"):
        backend = build_hf(RolloutConfig(batch_sequences=7, options={"loop": loop}), loaded=load(model))
        sampling = Sampling(temperature=0.0, max_new_tokens=30, stop=stop)
        drawn.append(backend.generate(PROMPTS, group_size=2, sampling=sampling, seed=0))
    for one, other in zip(*drawn, strict=True):
        assert (one.completion_ids, one.stop_reason, one.text) == (other.completion_ids, other.stop_reason, other.text)
        assert one.logps == pytest.approx(other.logps, abs=1e-5)


def test_the_library_draws_for_models_that_do_not_take_our_loop():
    model = llama()
    model.config._attn_implementation = "eager"
    rollouts = draw(load(model), group_size=8)
    for rollout, expected in zip(rollouts, trainer_logps(model, rollouts, 1.0), strict=True):
        assert rollout.logps == pytest.approx(expected, abs=1e-5)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("batch", [1, 5, 256])
def test_batches_change_no_random_number(batch):
    loaded = load()
    assert [r.completion_ids for r in draw(loaded, batch=batch)] == [r.completion_ids for r in draw(loaded, batch=12)]


def test_weights_that_change_inside_a_completion_are_stamped_token_by_token():
    loaded = load(llama(spread=0.1))
    backend = build_hf(RolloutConfig(), loaded=loaded)
    passes = []

    def change(module, arguments):
        passes.append(None)
        if len(passes) == 3:
            backend.update_weights(4)

    handle = loaded.model.model.register_forward_pre_hook(change)
    rollouts = backend.generate(PROMPTS, group_size=2, sampling=Sampling(temperature=1.0, max_new_tokens=6), seed=0)
    handle.remove()
    longest = max(rollouts, key=lambda r: len(r.completion_ids))
    assert longest.versions == (0, 0, 0, 4, 4, 4)
    assert all(r.versions == longest.versions[: len(r.completion_ids)] for r in rollouts)


@pytest.mark.parametrize("stop", [(), ("ab",)], ids=["eos", "stop"])
def test_long_sampled_completions_are_the_trainers_after_rows_have_left(stop):
    """Uneven endings over several stages, one batch: the recorded log-probs stay those of the learner."""
    model = llama(spread=0.25)
    rollouts = draw(load(model), group_size=16, max_new_tokens=45, stop=stop)
    lengths = [len(r.completion_ids) for r in rollouts]
    assert min(lengths) < 8 and max(lengths) > 24, "the test needs rows that leave and rows that stay"
    for rollout, expected in zip(rollouts, trainer_logps(model, rollouts, 1.0), strict=True):
        assert rollout.logps == pytest.approx(expected, abs=1e-5)
        assert (rollout.completion_ids[-1] == 0) is (rollout.stop_reason == "eos")
        assert rollout.stop_reason != "length" or len(rollout.completion_ids) == 45


def test_options_are_checked():
    for options, message in (({"share": True}, "allowed: loop"), ({"loop": "mine"}, "auto, library")):
        with pytest.raises(UserError, match=message):
            build_hf(RolloutConfig(options=options), loaded=load())


@pytest.mark.parametrize("at", [1, 3])
def test_weights_may_change_between_tokens(at):
    """Up to pass ``at`` the old weights draw, then the new ones, over the cache of the old; the versions say which."""
    loaded, new = load(), llama(seed=1).state_dict()
    settings = Sampling(temperature=1.0, max_new_tokens=6)
    before = draw(loaded)
    backend = build_hf(RolloutConfig(), loaded=loaded)
    passes = []

    def change():
        passes.append(backend.version)
        if len(passes) == at + 1:
            loaded.model.load_state_dict(new)
            backend.update_weights(7)

    backend.call_before_each_pass(change)
    mixed = backend.generate(PROMPTS, group_size=3, sampling=settings, seed=0)
    assert len(passes) == max(len(row.completion_ids) for row in mixed)
    for old, row in zip(before, mixed, strict=True):
        assert row.versions == tuple(0 if n < at else 7 for n in range(len(row.completion_ids)))
        assert (row.completion_ids[:at], row.logps[:at]) == (old.completion_ids[:at], old.logps[:at])
    assert any(row.logps[at:] != old.logps[at:] for old, row in zip(before, mixed, strict=True))
    after = trainer_logps(loaded.model, mixed, 1.0)
    assert any(row.logps[0] != pytest.approx(float(after[n][0]), abs=1e-3) for n, row in enumerate(mixed))
