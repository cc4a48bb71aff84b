"""The audit's statistics on synthetic gradients whose expectations are known; the sketch; layer groups; blocks."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.lab.audit import statistics
from kl_comedy.lab.audit.gradients import Sketch, layer_groups
from kl_comedy.lab.audit.measure import PANEL, equal_blocks, select_terms
from kl_comedy.lab.audit.report import AuditReport, BetaCheck, LayerResult, TermResult, render
from kl_comedy.lab.audit.statistics import Estimate
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
    for term, reference in draws(4000, seed=0, bias=bias):
        own, shared, ref = grams(term, reference)
        squares.append(float(statistics.mean_product(own)))
        biases.append(float(statistics.mean_product(statistics.difference_gram(own, shared, ref))))
        products.append(float(statistics.mean_product(shared)))
        spreads.append(float(statistics.noise(own)))
    for found, truth in (
        (squares, 1 + bias**2),
        (biases, bias**2),
        (products, 1.0),
        (spreads, WIDTH * (0.3**2 + 0.2**2)),
    ):
        mean, error = average(found)
        assert abs(mean - truth) < 4 * error, (mean, truth, error)


def test_products_of_all_blocks_would_be_biased():
    """What the diagonal would add: the trace of the covariance over K, here as large as the norm itself."""
    plain = [float((term @ term.T).mean()) for term, _ in draws(500, seed=1)]
    assert average(plain)[0] > 1.5


def test_intervals_cover_what_they_estimate():
    wanted = {"delivered": 1.0, "cosine": 1 / math.sqrt(1.25), "squared_bias": 0.25}
    covered = dict.fromkeys(wanted, 0)
    for term, reference in draws(300, seed=2, bias=0.5):
        own, shared, ref = grams(term, reference)
        found = {
            "delivered": statistics.estimate(statistics.delivered, shared, ref),
            "cosine": statistics.estimate(statistics.cosine, own, shared, ref),
            "squared_bias": statistics.estimate(
                statistics.squared_bias, statistics.difference_gram(own, shared, ref), ref
            ),
        }
        for name, truth in wanted.items():
            covered[name] += found[name].low <= truth <= found[name].high
    assert all(count / 300 > 0.9 for count in covered.values()), covered


def test_the_sign_flip_test_keeps_its_level_and_sees_a_bias():
    generator = torch.Generator().manual_seed(0)

    def rejected(bias):
        found = [
            statistics.p_of_zero_mean(statistics.difference_gram(*grams(*pair)), generator) < 0.05
            for pair in draws(400, seed=3, bias=bias)
        ]
        return sum(found) / len(found)

    assert 0.02 < rejected(0.0) < 0.085
    assert rejected(0.8) > 0.9


def test_the_sign_flip_test_depends_on_its_generator_only():
    term, reference = next(iter(draws(1, seed=4)))
    gram = statistics.difference_gram(*grams(term, reference))
    state = torch.get_rng_state()
    first, second = (statistics.p_of_zero_mean(gram, torch.Generator().manual_seed(5)) for _ in range(2))
    assert first == second and torch.equal(state, torch.get_rng_state())


def test_a_cosine_without_a_norm_is_not_a_number():
    below_zero = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    assert math.isnan(float(statistics.cosine(below_zero, below_zero, torch.ones(3, 3))))


def test_two_blocks_have_no_interval():
    with pytest.raises(ValueError, match="at least 3 blocks, got 2"):
        statistics.estimate(statistics.mean_product, torch.ones(2, 2))


# --- sketch -------------------------------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(dimension=st.integers(1, 400), size=st.integers(0, 64), seed=st.integers(0, 99))
def test_the_sketch_is_linear_and_keeps_its_width(dimension, size, seed):
    sketch = Sketch(dimension, size, torch.Generator().manual_seed(seed))
    x, y = torch.randn(2, dimension, generator=torch.Generator().manual_seed(seed + 1))
    assert sketch(x).shape == (sketch.width,) and sketch.width == (dimension if sketch.exact else size)
    assert torch.allclose(sketch(2 * x - y), 2 * sketch(x) - sketch(y), atol=1e-4)
    if sketch.exact:
        assert torch.equal(sketch(x), x)
    else:
        unit = torch.zeros(dimension)
        unit[seed % dimension] = 1.0
        assert sketch(unit).abs().sum() == 1.0, "every coordinate goes to one bucket"


def test_sketched_products_are_unbiased_and_as_precise_as_promised():
    x, y = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    y = y + 0.5 * x
    size = 256
    found = []
    for seed in range(400):
        sketch = Sketch(5000, size, torch.Generator().manual_seed(seed))
        found.append(float(sketch(x) @ sketch(y)))
    mean, error = average(found)
    assert abs(mean - float(x @ y)) < 4 * error
    assert error * math.sqrt(400) < 1.1 * float(x.norm() * y.norm()) * math.sqrt(2 / size)


def test_a_sketch_refuses_a_vector_of_another_length():
    with pytest.raises(ValueError, match="3 numbers was promised"):
        Sketch(3, 0, torch.Generator())(torch.zeros(4))


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
    assert [group.name for group in groups] == names
    assert sum(group.size for group in groups) == sum(p.numel() for p in model.parameters())
    model.model.embed.weight.requires_grad_(False)
    assert sum(group.size for group in layer_groups(model)) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


def row(group):
    prompt = Prompt(problem=Problem(id="a", text="a", answer="1"), text="a", token_ids=(1,))
    rollout = Rollout(
        prompt=prompt, group_id=group, completion_ids=(1,), logps=(-1.0,), versions=(0,), stop_reason="eos", text="1"
    )
    return Scored(rollout=rollout, reward=Reward(value=0.0))


@given(groups=st.integers(1, 20), size=st.integers(1, 4), blocks=st.integers(1, 9))
def test_blocks_are_equal_and_of_whole_groups(groups, size, blocks):
    rows = [row(group) for group in range(groups) for _ in range(size)]
    found = equal_blocks(rows, blocks)
    assert len(found) == min(blocks, groups)
    assert len({len(block) for block in found}) == 1
    together = [r for block in found for r in block]
    assert together == rows[: len(together)] and len(rows) - len(together) < len(found) * size
    assert all(len(block) % size == 0 for block in found)


def test_the_terms_to_audit_are_the_configs_first_and_no_shape_twice():
    own = (KLTerm("k3", placement="loss", beta=0.2), KLTerm("k1", placement="loss", beta=0.1))
    found = select_terms(["panel", "grpo", "own"], own, [0.2, 0.1], on_policy=True, key="--terms")
    assert [item.position for item in found[:3]] == [0, 1, None]
    shapes = [replace(item.term, beta=1.0) for item in found]
    assert len(shapes) == len(set(shapes)) == len({item.key for item in found})
    assert {item.beta for item in found if item.position is None} == {0.2}
    assert {item.term for item in select_terms(["panel"], (), (), on_policy=False, key="--terms")} == set(PANEL)
    with pytest.raises(UserError, match=r"--terms: got 'gpro'.*did you mean 'grpo'"):
        select_terms(["gpro"], own, [0.2, 0.1], on_policy=True, key="--terms")


def finding(**changes):
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
        layers={"head": LayerResult(cosine=1.0, delivered=1.0, bias=math.nan)},
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
    assert finding(**changes).verdict == verdict


@pytest.mark.parametrize("format", ["table", "markdown", "csv", "json"])
def test_a_report_is_rendered_with_what_is_undefined_left_empty(format):
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
        sketch=0,
        seconds=1.0,
        terms=[finding(), finding(cosine=None, delivered=NOWHERE, bias=NOWHERE, label="other")],
    )
    text = render(report, format)
    assert "nan" not in text.lower() and "other" in text
    if format == "markdown":
        assert "a \\| b" in text
    if format in ("table", "markdown"):
        assert "clipped at 10.0% of tokens" in text and "hidden by noise" in text
