"""The transformers backend on tiny random models: what it draws is what the learner differentiates."""

import dataclasses
import functools
import itertools
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
END = VOCAB["<e>"]


def tokenizer():
    inner = Tokenizer(models.WordLevel(VOCAB, unk_token="<e>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    wrapped = Fast(tokenizer_object=inner, eos_token="<e>")
    # The trap of many models: padding is the end token.
    wrapped.pad_token = "<e>"
    wrapped.padding_side = "left"
    return wrapped


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
    settings = {"temperature": 1.0, "max_new_tokens": 6} | sampling
    return backend.generate(prompts, group_size=group_size, sampling=Sampling(**settings), seed=seed)


def trainer_logps(model, rollouts, temperature):
    """What the learner computes for the same tokens, in one padded batch."""
    B = len(rollouts)
    P = max(len(rollout.prompt.token_ids) for rollout in rollouts)
    T = max(len(rollout.completion_ids) for rollout in rollouts)
    prompt_ids_BP = torch.zeros(B, P, dtype=torch.long)
    prompt_mask_BP = torch.zeros(B, P)
    ids_BT = torch.zeros(B, T, dtype=torch.long)
    mask_BT = torch.zeros(B, T, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        prompt_start = P - len(rollout.prompt.token_ids)
        prompt_ids_BP[row, prompt_start:] = torch.tensor(rollout.prompt.token_ids)
        prompt_mask_BP[row, prompt_start:] = 1
        length = len(rollout.completion_ids)
        ids_BT[row, :length] = torch.tensor(rollout.completion_ids)
        mask_BT[row, :length] = True
    with torch.no_grad():
        scored = token_pass(
            model,
            prompt_ids_BP=prompt_ids_BP,
            prompt_mask_BP=prompt_mask_BP,
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            temperature=temperature,
            chunk_elements=10**6,
        )
    logps = []
    for rollout, logp_T in zip(rollouts, scored.logp_BT, strict=True):
        logps.append(logp_T[: len(rollout.completion_ids)].tolist())
    return logps


def assert_the_trainers_log_probs(model, rollouts, *, temperature=1.0, abs=1e-5):
    """The log-probs that the sampler recorded are those that the learner computes, up to ``abs`` nats."""
    for rollout, expected in zip(rollouts, trainer_logps(model, rollouts, temperature), strict=True):
        assert rollout.logps == pytest.approx(expected, abs=abs)


def own_logits(model, rollout):
    """The model's logits ``[T, V]`` of the completion's tokens, by one plain pass without padding."""
    prompt_length = len(rollout.prompt.token_ids)
    ids = torch.tensor([rollout.prompt.token_ids + rollout.completion_ids])
    return model(ids).logits[0, prompt_length - 1 : -1].detach()


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
    assert_the_trainers_log_probs(model, rollouts, temperature=temperature)


@pytest.mark.parametrize("k", [3, 99])
@pytest.mark.parametrize("options", [{}, {"loop": "library"}], ids=["our loop", "library"])
def test_the_samplers_likeliest_tokens_come_with_the_rollouts(options, k):
    """At every token, in order and at the sampling temperature; a list longer than the vocabulary is the vocabulary."""
    model = llama(torch.float64)
    backend = build_hf(RolloutConfig(batch_sequences=5, options=options), loaded=load(model))
    sampling = Sampling(temperature=0.7, max_new_tokens=12, top_logps=k)
    rollouts = backend.generate(PROMPTS, group_size=6, sampling=sampling, seed=0)
    assert len({len(rollout.completion_ids) for rollout in rollouts}) > 1, "completions that leave a batch early"
    for rollout in rollouts:
        logp_TV = (own_logits(model, rollout) / 0.7).log_softmax(-1)
        order_TV = logp_TV.argsort(-1, descending=True)
        ids_TK, logp_TK = rollout.sampler_top
        assert ids_TK.tolist() == order_TV[:, :k].tolist()
        torch.testing.assert_close(logp_TK.double(), logp_TV.gather(1, order_TV)[:, :k], atol=1e-5, rtol=0)


def test_no_list_is_made_where_none_is_asked_for():
    assert all(rollout.sampler_top is None for rollout in draw())


def test_order_groups_versions_and_texts():
    backend = build_hf(RolloutConfig(batch_sequences=5), loaded=load())
    backend.update_weights(7)
    rollouts = backend.generate(PROMPTS, group_size=3, sampling=Sampling(temperature=1.0, max_new_tokens=6), seed=0)
    assert [rollout.group_id for rollout in rollouts] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for rollout in rollouts:
        assert rollout.prompt is PROMPTS[rollout.group_id]
    for rollout in rollouts:
        ids = rollout.completion_ids
        assert rollout.versions == (7,) * len(ids)
        assert len(rollout.logps) == len(ids)
        assert rollout.text == "".join(LETTERS[token - 1] for token in ids if token != END)
        assert_ended(rollout, max_new_tokens=6)
    assert {rollout.stop_reason for rollout in rollouts} == {"eos", "length"}
    assert len({rollout.completion_ids for rollout in rollouts}) > 6, "a group is not one completion repeated"


def assert_ended(rollout, *, max_new_tokens):
    """The end token is the last one, exactly where the reason is ``eos``; ``length`` is the whole length."""
    assert (rollout.completion_ids[-1] == END) is (rollout.stop_reason == "eos")
    assert END not in rollout.completion_ids[:-1]
    if rollout.stop_reason == "length":
        assert len(rollout.completion_ids) == max_new_tokens


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
    loaded = _shared()
    prompts = [prompt(text) for text in texts]
    together = draw(loaded, prompts, group_size=1, batch=batch, temperature=temperature)
    if temperature == 0:
        for rollout, its_prompt in zip(together, prompts, strict=True):
            (alone,) = draw(loaded, [its_prompt], group_size=1, temperature=0.0)
            assert rollout.completion_ids == alone.completion_ids
    for rollout in together:
        assert_the_trainers_log_probs(loaded.model, [rollout], abs=5e-5)


@functools.cache
def _shared():
    return load()


def test_greedy_takes_the_likeliest_token_with_the_untempered_log_prob():
    model = llama()
    rollouts = draw(load(model), temperature=0.0, group_size=2)
    assert rollouts[0] == rollouts[1]
    for rollout in rollouts:
        logp_TV = own_logits(model, rollout).log_softmax(-1)
        assert rollout.completion_ids == tuple(logp_TV.argmax(-1).tolist())
        assert rollout.logps == pytest.approx(logp_TV.max(-1).values.tolist(), abs=1e-5)


def two_likeliest(p_TV):
    return p_TV >= p_TV.topk(2).values[..., -1:]


def at_least_three_tenths_of_the_likeliest(p_TV):
    return p_TV >= 0.3 * p_TV.max(-1, keepdim=True).values


def nucleus_of_six_tenths(p_TV):
    """The likeliest tokens up to and including the one with which their mass reaches 0.6."""
    sorted_TV, order_TV = p_TV.sort(-1, descending=True)
    mass_before_TV = sorted_TV.cumsum(-1) - sorted_TV
    return torch.zeros_like(p_TV, dtype=torch.bool).scatter(-1, order_TV, mass_before_TV < 0.6)


@pytest.mark.parametrize(
    ("truncation", "allowed_tokens"),
    [
        ({"top_k": 2}, two_likeliest),
        ({"min_p": 0.3}, at_least_three_tenths_of_the_likeliest),
        ({"top_p": 0.6}, nucleus_of_six_tenths),
    ],
    ids=["top_k", "min_p", "top_p"],
)
def test_truncated_sampling_reports_the_truncated_distribution(truncation, allowed_tokens):
    model = llama()
    for rollout in draw(load(model), temperature=0.8, group_size=6, **truncation):
        logits_TV = own_logits(model, rollout) / 0.8
        allowed_TV = allowed_tokens(logits_TV.softmax(-1))
        logp_TV = logits_TV.masked_fill(~allowed_TV, float("-inf")).log_softmax(-1)
        expected_T = logp_TV.gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
        assert rollout.logps == pytest.approx(expected_T.tolist(), abs=1e-5)


def test_sampled_frequencies_are_the_policys():
    """2000 first tokens against the exact distribution: chi-square, false alarm about 1 in 1000."""
    draws = 2000
    model = llama(spread=0.2)
    rollouts = draw(load(model), [prompt("abc")], group_size=draws, batch=draws, max_new_tokens=1, temperature=0.7)
    with torch.no_grad():
        logits_V = model(torch.tensor([prompt("abc").token_ids])).logits[0, -1]
    expected_V = draws * (logits_V / 0.7).softmax(-1).double()
    first_tokens = torch.tensor([rollout.completion_ids[0] for rollout in rollouts])
    counts_V = torch.bincount(first_tokens, minlength=len(VOCAB)).double()
    chi_square = float(((counts_V - expected_V) ** 2 / expected_V).sum())
    assert chi_square < 29.6, "10 degrees of freedom"


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
    assert model.generation_config is nasty, "it is put back"
    assert nasty.top_k == 1
    assert len({rollout.completion_ids for rollout in expected}) > 6


def test_the_test_above_would_notice():
    """A plain ``generate`` with top_k = 1 draws one completion eight times."""
    model = llama()
    model.generation_config = GenerationConfig(eos_token_id=0, do_sample=True, top_k=1)
    ids = torch.tensor([prompt("abc").token_ids] * 8)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, pad_token_id=0)
    assert len({tuple(row) for row in out.tolist()}) == 1


def test_every_end_token_of_the_model_ends_a_completion():
    model = llama()
    model.generation_config.eos_token_id = [3, 4]
    end_tokens = {END, 3, 4}
    rollouts = draw(load(model), group_size=10, max_new_tokens=12)
    assert {rollout.completion_ids[-1] for rollout in rollouts if rollout.stop_reason == "eos"} == end_tokens
    for rollout in rollouts:
        assert not end_tokens & set(rollout.completion_ids[:-1])
    assert_the_trainers_log_probs(model, rollouts)


def commonest_pair(texts):
    """The two different letters that stand together in most of the texts, but for their last letters."""
    pairs = [first + second for first in LETTERS for second in LETTERS if first != second]
    return max(pairs, key=lambda pair: sum(pair in text[:-2] for text in texts))


def test_stop_strings_cut_ids_log_probs_and_text_alike():
    model = llama()
    free = draw(load(model), group_size=12, max_new_tokens=12)
    pair = commonest_pair([rollout.text for rollout in free])
    stopped = draw(load(model), group_size=12, max_new_tokens=12, stop=(pair,))
    assert "stop" in {rollout.stop_reason for rollout in stopped}, "the commonest pair of the free run occurs"
    for rollout in stopped:
        assert len(rollout.logps) == len(rollout.completion_ids)
        assert len(rollout.versions) == len(rollout.completion_ids)
        assert rollout.text.endswith(pair) == (rollout.stop_reason == "stop")
        assert pair not in rollout.text[:-1]
    assert_the_trainers_log_probs(model, stopped)


def test_modes_are_restored_and_no_gradient_state_is_left():
    model = llama()
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    draw(load(model))
    assert [module.training for module in model.modules()] == modes
    loss = model(torch.arange(5)[None]).logits.sum()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name


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
    assert_the_trainers_log_probs(model, rollouts)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 60}, r"max_new_tokens: got 60; allowed: up to 58.*longest prompt has 6 tokens"),
        ({"prompts": [dataclasses.replace(PROMPTS[0], token_ids=())]}, "a prompt is empty"),
        ({"group_size": 0}, "group_size"),
    ],
    ids=["longer than the model", "an empty prompt", "an empty group"],
)
def test_what_cannot_be_sampled_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        draw(**settings)


def test_no_prompts_are_no_rollouts():
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
    prompts = []
    for text in ("The capital of France is", "2 + 3 = 5\n4 + 1 ="):
        ids = tuple(loaded.tokenizer(text).input_ids)
        prompts.append(Prompt(problem=Problem(id=text, text=text, answer=""), text=text, token_ids=ids))
    rollouts = draw(loaded, prompts, group_size=2, temperature=0.7, stop=("\n",))
    assert_the_trainers_log_probs(loaded.model, rollouts, temperature=0.7, abs=2e-4)
    (greedy,) = draw(loaded, prompts[:1], group_size=1, temperature=0.0)
    assert "Paris" in greedy.text


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("stop", [(), ("ab", "c")], ids=["eos", "stop"])
def test_our_loop_draws_the_librarys_greedy_completions(make, stop):
    """Shared prompts and rows that leave: the tokens, reasons and log-probs of ``generate``."""
    model = make()

    def drawn_by(loop):
        backend = build_hf(RolloutConfig(batch_sequences=7, options={"loop": loop}), loaded=load(model))
        sampling = Sampling(temperature=0.0, max_new_tokens=30, stop=stop)
        return backend.generate(PROMPTS, group_size=2, sampling=sampling, seed=0)

    for ours, librarys in zip(drawn_by("auto"), drawn_by("library"), strict=True):
        assert ours.completion_ids == librarys.completion_ids
        assert ours.stop_reason == librarys.stop_reason
        assert ours.text == librarys.text
        assert ours.logps == pytest.approx(librarys.logps, abs=1e-5)


def test_the_library_draws_for_models_that_do_not_take_our_loop():
    model = llama()
    model.config._attn_implementation = "eager"
    rollouts = draw(load(model), group_size=8)
    assert_the_trainers_log_probs(model, rollouts)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("batch", [1, 5, 256])
def test_batches_change_no_random_number(batch):
    loaded = load()
    completions = [rollout.completion_ids for rollout in draw(loaded, batch=batch)]
    assert completions == [rollout.completion_ids for rollout in draw(loaded, batch=12)]


def test_weights_that_change_inside_a_completion_are_stamped_token_by_token():
    loaded = load(llama(spread=0.1))
    backend = build_hf(RolloutConfig(), loaded=loaded)
    passes = itertools.count(1)

    def update_within_the_third_pass(module, arguments):
        # The third token is stamped already: the update is seen from the fourth on.
        if next(passes) == 3:
            backend.update_weights(4)

    handle = loaded.model.model.register_forward_pre_hook(update_within_the_third_pass)
    rollouts = backend.generate(PROMPTS, group_size=2, sampling=Sampling(temperature=1.0, max_new_tokens=6), seed=0)
    handle.remove()
    expected = (0, 0, 0, 4, 4, 4)
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    assert max(lengths) == len(expected)
    for rollout, length in zip(rollouts, lengths, strict=True):
        assert rollout.versions == expected[:length]


@pytest.mark.parametrize("stop", [(), ("ab",)], ids=["eos", "stop"])
def test_long_sampled_completions_are_the_trainers_after_rows_have_left(stop):
    """Uneven endings over several stages, one batch: the recorded log-probs stay those of the learner."""
    model = llama(spread=0.25)
    rollouts = draw(load(model), group_size=16, max_new_tokens=45, stop=stop)
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    assert min(lengths) < 8, "the test needs rows that leave"
    assert max(lengths) > 24, "the test needs rows that stay"
    assert_the_trainers_log_probs(model, rollouts)
    for rollout in rollouts:
        assert_ended(rollout, max_new_tokens=45)


@pytest.mark.parametrize(
    ("options", "message"), [({"share": True}, "allowed: loop"), ({"loop": "mine"}, "auto, library")]
)
def test_options_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        build_hf(RolloutConfig(options=options), loaded=load())


@pytest.mark.parametrize("old_tokens", [1, 3])
def test_weights_may_change_between_tokens(old_tokens):
    """The old weights draw some tokens, then the new ones, over the cache of the old; the versions say which."""
    loaded = load()
    old_rollouts = draw(loaded)
    new_weights = llama(seed=1).state_dict()
    backend = build_hf(RolloutConfig(), loaded=loaded)
    versions_of_passes = []

    def change():
        versions_of_passes.append(backend.version)
        if len(versions_of_passes) == old_tokens + 1:
            loaded.model.load_state_dict(new_weights)
            backend.update_weights(7)

    backend.call_before_each_pass(change)
    settings = Sampling(temperature=1.0, max_new_tokens=6)
    mixed = backend.generate(PROMPTS, group_size=3, sampling=settings, seed=0)
    lengths = [len(rollout.completion_ids) for rollout in mixed]
    assert len(versions_of_passes) == max(lengths)
    later_logps_differ = []
    for old, rollout, length in zip(old_rollouts, mixed, lengths, strict=True):
        expected_versions = (0,) * old_tokens + (7,) * (max(lengths) - old_tokens)
        assert rollout.versions == expected_versions[:length]
        assert rollout.completion_ids[:old_tokens] == old.completion_ids[:old_tokens]
        assert rollout.logps[:old_tokens] == old.logps[:old_tokens]
        later_logps_differ.append(rollout.logps[old_tokens:] != old.logps[old_tokens:])
    assert any(later_logps_differ)
    by_new_weights = trainer_logps(loaded.model, mixed, 1.0)
    first_logps = [rollout.logps[0] for rollout in mixed]
    assert first_logps != pytest.approx([logps[0] for logps in by_new_weights], abs=1e-3)
