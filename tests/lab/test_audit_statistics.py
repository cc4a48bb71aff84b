"""The audit's statistics on synthetic gradients whose expectations are known; the sketch; layer groups; blocks."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kl_comedy.config import Config, load_config
from kl_comedy.errors import UserError
from kl_comedy.lab.audit import grams as statistics
from kl_comedy.lab.audit import measure
from kl_comedy.lab.audit.gradients import GradientSketch, Sketch, layer_groups
from kl_comedy.lab.audit.measure import PANEL, equal_blocks, select_terms
from kl_comedy.lab.audit.report import AuditReport, BetaCheck, Estimate, TermResult
from kl_comedy.objective import sequence_weights
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored

BLOCKS, WIDTH = 8, 40


def draws(count, *, seed, bias=0.0, own_noise=0.3):
    """``count`` experiments of K blocks: reference ``r`` around a unit vector, ``g = r + bias * b + noise``."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.zeros(WIDTH, dtype=torch.float64)
    mean[0] = 1.0
    wrong = torch.zeros(WIDTH, dtype=torch.float64)
    wrong[1] = 1.0
    for _ in range(count):
        noise = torch.randn(2, BLOCKS, WIDTH, generator=generator, dtype=torch.float64)
        reference = mean + 0.2 * noise[0]
        yield reference + bias * wrong + own_noise * noise[1], reference


def grams(term, reference):
    return term @ term.T, term @ reference.T, reference @ reference.T


def average(values):
    values = torch.tensor(values, dtype=torch.float64)
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_squares_are_unbiased_though_both_gradients_share_their_completions(bias):
    squares, biases, products, spreads = [], [], [], []
    for term, reference in draws(2000, seed=0, bias=bias):
        term_KK, shared, ref = grams(term, reference)
        squares.append(float(statistics.mean_product(term_KK)))
        biases.append(float(statistics.mean_product(statistics.difference_gram(term_KK, shared, ref))))
        products.append(float(statistics.mean_product(shared)))
        spreads.append(float(statistics.noise(term_KK)))
    truths = (1 + bias**2, bias**2, 1.0, WIDTH * (0.3**2 + 0.2**2))
    for estimates, truth in zip((squares, biases, products, spreads), truths, strict=True):
        mean, error = average(estimates)
        assert abs(mean - truth) < 4 * error, (mean, truth, error)


def test_intervals_cover_what_they_estimate():
    wanted = {"delivered": 1.0, "cosine": 1 / math.sqrt(1.25), "squared_bias": 0.25}
    covered = dict.fromkeys(wanted, 0)
    for term, reference in draws(200, seed=2, bias=0.5):
        term_KK, shared, ref = grams(term, reference)
        estimates = {
            "delivered": statistics.estimate(statistics.delivered, shared, ref),
            "cosine": statistics.estimate(statistics.cosine, term_KK, shared, ref),
            "squared_bias": statistics.estimate(
                statistics.squared_bias, statistics.difference_gram(term_KK, shared, ref), ref
            ),
        }
        for name, truth in wanted.items():
            covered[name] += estimates[name].low <= truth <= estimates[name].high
    assert all(count / 200 > 0.9 for count in covered.values()), covered


def test_the_sign_flip_test_has_its_level_and_detects_a_bias():
    generator = torch.Generator().manual_seed(0)

    def rejected(bias):
        tests = [
            statistics.p_of_zero_mean(statistics.difference_gram(*grams(*pair)), generator) < 0.05
            for pair in draws(400, seed=3, bias=bias)
        ]
        return sum(tests) / len(tests)

    assert 0.02 < rejected(0.0) < 0.085
    assert rejected(0.8) > 0.9


def test_a_cosine_without_a_norm_is_not_a_number():
    below_zero = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    assert math.isnan(float(statistics.cosine(below_zero, below_zero, torch.ones(3, 3))))


# --- sketch -------------------------------------------------------------------------------------------------------
def sketched(sketch, vector, cut=0):
    """Of a vector in two parts, as two ranks hold it; at the default in one."""
    folded = torch.zeros(sketch.width)
    sketch.add(folded, vector[:cut], 0)
    sketch.add(folded, vector[cut:], cut)
    return folded


@settings(max_examples=40, deadline=None)
@given(dimension=st.integers(1, 400), size=st.integers(0, 64), seed=st.integers(0, 99), cut=st.floats(0, 1))
def test_the_sketch_is_linear_and_keeps_its_width(dimension, size, seed, cut):
    sketch = Sketch(dimension, size, torch.Generator().manual_seed(seed))
    x, y = torch.randn(2, dimension, generator=torch.Generator().manual_seed(seed + 1))
    whole = sketched(sketch, x)
    assert whole.shape == (sketch.width,) and sketch.width == (dimension if sketch.exact else size)
    assert torch.allclose(sketched(sketch, 2 * x - y), 2 * whole - sketched(sketch, y), atol=1e-4)
    assert torch.allclose(sketched(sketch, x, int(cut * dimension)), whole, atol=1e-4)
    if sketch.exact:
        assert torch.equal(whole, x)
    else:
        unit = torch.zeros(dimension)
        unit[seed % dimension] = 1.0
        assert sketched(sketch, unit).abs().sum() == 1.0, "every coordinate goes to one bucket"


def test_sketched_products_are_unbiased_and_as_precise_as_promised():
    x, y = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    y = y + 0.5 * x
    size = 256
    products = []
    for seed in range(400):
        sketch = Sketch(5000, size, torch.Generator().manual_seed(seed))
        products.append(float(sketched(sketch, x) @ sketched(sketch, y)))
    mean, error = average(products)
    assert abs(mean - float(x @ y)) < 4 * error
    assert error * math.sqrt(400) < 1.1 * float(x.norm() * y.norm()) * math.sqrt(2 / size)


# --- layers, rows, panel, text ------------------------------------------------------------------------------------
class Toy(nn.Module):
    def __init__(self, blocks, tied):
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(blocks))
        self.norm = nn.LayerNorm(2)
        self.lm_head = nn.Linear(2, 5, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head


class Causal(nn.Module):
    """As a causal LM: the decoder body is a module of its own."""

    def __init__(self, blocks, tied=False):
        super().__init__()
        self.model = Toy(blocks, tied)

    def get_input_embeddings(self):
        return self.model.embed

    def get_output_embeddings(self):
        return self.model.lm_head


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Causal(2), ["embeddings", "block 0", "block 1", "head"]),
        (Causal(2, tied=True), ["embeddings and head", "block 0", "block 1", "final norm"]),
        (Causal(13), ["embeddings", "blocks 0-2", "blocks 3-5", "blocks 6-8", "blocks 9-11", "block 12", "head"]),
    ],
)
def test_every_trainable_parameter_is_in_one_layer_group(model, names):
    groups = layer_groups(model)
    assert list(groups) == names
    assert {id(p) for group in groups.values() for p in group} == {id(p) for p in model.parameters()}
    sketch = GradientSketch(groups, 0)
    gradients = [torch.randn_like(p) for p in sketch.parameters]
    folded = sketch.fold([None, *gradients[1:]])
    assert torch.equal(torch.cat(folded)[gradients[0].numel() :], torch.cat([g.flatten() for g in gradients[1:]]))
    assert not folded[0][: gradients[0].numel()].any()
    model.model.embed.weight.requires_grad_(False)
    assert sum(len(group) for group in layer_groups(model).values()) == len(list(model.parameters())) - 1


def row(group):
    prompt = Prompt(problem=Problem(id="a", text="a", answer="1"), text="a", token_ids=(1,))
    rollout = Rollout(
        prompt=prompt, group_id=group, completion_ids=(1,), logps=(-1.0,), versions=(0,), stop_reason="eos", text="1"
    )
    return Scored(rollout=rollout, reward=Reward(value=0.0))


@given(groups=st.integers(1, 20), size=st.integers(1, 4), blocks=st.integers(1, 9))
def test_blocks_are_equal_and_of_whole_groups(groups, size, blocks):
    rows = [row(group) for group in range(groups) for _ in range(size)]
    split = equal_blocks(rows, blocks)
    assert len(split) == min(blocks, groups)
    assert len({len(block) for block in split}) == 1
    together = [r for block in split for r in block]
    assert together == rows[: len(together)] and len(rows) - len(together) < len(split) * size
    assert all(len(block) % size == 0 for block in split)


def test_the_terms_to_audit_are_the_configs_first_and_no_shape_twice():
    config = load_config(
        None, ["kl=[{estimator: k3, placement: loss, beta: 0.2}, {estimator: k1, placement: loss, beta: 0.1}]"]
    )
    selected = select_terms(["panel", "grpo", "own"], config, key="--terms")
    assert [(item.position, item.beta) for item in selected[:3]] == [(0, 0.2), (1, 0.1), (None, 0.2)]
    assert not any(item.term.correction != "none" for item in selected), "ratios are one on-policy"
    shapes = [replace(item.term, beta=1.0) for item in selected]
    assert len(shapes) == len(set(shapes)) == len({item.key for item in selected})
    in_force = {"kl_0": 3.0, "kl_1": 4.0}
    assert [item.beta for item in select_terms(["own"], config, key="--terms", betas=in_force)] == [3.0, 4.0]
    stale = load_config(None, ["kl=[]", "lag.mode=replayed", "lag.steps=2"])
    assert {item.term for item in select_terms(["panel"], stale, key="--terms")} == set(PANEL)
    with pytest.raises(UserError, match=r"--terms: got 'gpro'.*did you mean 'grpo'"):
        select_terms(["gpro"], config, key="--terms")


def result_of(**changes):
    whole = Estimate(value=1.0, low=0.9, high=1.1)
    plain = dict(
        key="kl_0",
        label="kl.0: a | b",
        position=0,
        beta=0.1,
        delivered=whole,
        cosine=whole,
        bias=whole,
        p_unbiased=0.5,
        p_no_mean=0.001,
        variance=1.0,
        kl_to_policy=0.5,
        silent_share=0.0,
        clamped_share=None,
        capped_share=None,
        layers={name: {"cosine": 1.0, "delivered": 1.0, "bias": math.nan} for name in ("embeddings", "head")},
    )
    return TermResult(**{**plain, **changes})


NOWHERE = Estimate(value=math.nan, low=math.nan, high=math.nan)
OF_A_CHECK = {"change": 0.1, "disagreement": 0.0}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "no bias found"),
        ({"p_unbiased": 0.0004}, "biased (p < 0.001)"),
        ({"p_unbiased": 0.006}, "biased (p 0.006)"),
        ({"p_unbiased": 0.02}, "no bias found"),
        ({"p_no_mean": 0.4, "p_unbiased": 0.001}, "no mean gradient found: noise"),
        ({"bias": NOWHERE}, "no reference gradient to compare with"),
        ({"check": BetaCheck(**OF_A_CHECK, inert=True, wrong=False)}, "INERT: beta does not change the gradient"),
        ({"check": BetaCheck(**OF_A_CHECK, inert=False, wrong=True)}, "WRONG: training follows another gradient"),
    ],
)
def test_verdicts(changes, verdict):
    assert result_of(**changes).verdict == verdict


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_projection_is_of_updates_clipped_as_training_clips_them(scale):
    """One update has a spike along the reference gradient: it counts as much as the bound lets through."""
    reference = torch.eye(WIDTH, dtype=torch.float64)[:1].expand(BLOCKS, WIDTH)
    policy = torch.zeros(BLOCKS, WIDTH, dtype=torch.float64)
    policy[:, 1] = 2.0
    update = policy + 0.5 * reference
    update[0, 0] = 1000.0
    gram = {name: a @ b.T for name, a, b in (("uu", update, update), ("ur", update, reference))}
    gram |= {name: a @ b.T for name, a, b in (("pp", policy, policy), ("pr", policy, reference))}
    args = gram["uu"], gram["pp"], gram["ur"], gram["pr"], reference @ reference.T
    free = statistics.kl_projection(*args, scale=scale, bound=math.inf)
    assert float(free) == pytest.approx((1000.0 + 7 * 0.5) / 8 / 2.0)
    if scale == 1.0:  # blocks are updates: c(u) is u but for the spike, which has norm 3
        clipped = statistics.kl_projection(*args, scale=scale, bound=3.0)
        assert float(clipped) == pytest.approx((3.0 * 1000 / math.hypot(1000, 2) + 7 * 0.5) / 8 / 2.0)
    assert math.isnan(statistics.kl_projection(*args[:4], 0 * args[4], scale=scale, bound=3.0))


def report_of(**changes):
    report = AuditReport(
        name="x",
        version=3,
        regime="off_policy",
        completions=8,
        blocks=4,
        length=2.0,
        exact_kl_token=0.1,
        exact_kl_sequence=0.2,
        reference_term="r",
        reference_noise=math.nan,
        policy_silent_share=0.0,
        clip_share=0.1,
        total_kl_to_policy=math.nan,
        kl_projection=NOWHERE,
        sketch=0,
        seconds=1.0,
        terms=[],
    )
    return replace(report, **changes)


def test_a_warning_where_the_kl_terms_drive_the_policy_away():
    away = Estimate(value=-0.3, low=-0.4, high=-0.1)
    report = report_of(kl_projection=away)
    assert "away from the reference" in report.drives_away and "-0.3 [-0.4, -0.1]" in report.headline()
    assert not report_of(kl_projection=replace(away, high=0.1)).drives_away
    assert not report_of().drives_away


@pytest.mark.parametrize("format", ["table", "markdown", "csv", "json"])
def test_a_report_is_rendered_with_what_is_undefined_left_empty(format):
    report = report_of(terms=[result_of(), result_of(cosine=None, delivered=NOWHERE, bias=NOWHERE, label="other")])
    text = report.render(format)
    assert "nan" not in text.lower() and "other" in text
    if format == "markdown":
        assert "a \\| b" in text
    if format in ("table", "markdown"):
        assert "clipped at 10.0% of tokens" in text and "hidden by noise" in text


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_token_mean", "sequence_sum"])
def test_the_bound_of_clipping_does_not_depend_on_the_size_of_a_block(reduction):
    """A gradient of training is the weights' sum times the mean, whatever part of an update the mean is over."""
    config = Config()
    config.optimizer.clip_norm = 0.7

    def bound_of_a_block(rows):
        mask_BT = torch.ones(rows, 5, dtype=torch.bool)
        weight = float(sequence_weights(reduction, mask_BT, constant=3.0).sum())
        return measure._clip_bound(config, weight)

    # The gradient of an update of 16, which training clips at 0.7, is this sum of weights times the mean.
    weight_of_an_update = float(sequence_weights(reduction, torch.ones(16, 5).bool(), constant=3.0).sum())
    for rows in (16, 8, 2):
        assert bound_of_a_block(rows) * weight_of_an_update == pytest.approx(0.7)
