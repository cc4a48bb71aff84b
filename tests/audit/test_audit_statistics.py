"""The audit's statistics on synthetic gradients whose expectations are known; the sketch; layer groups; blocks."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kl_comedy.audit import grams as statistics
from kl_comedy.audit import measure
from kl_comedy.audit.gradients import GradientSketch, Sketch, layer_groups
from kl_comedy.audit.measure import PANEL, equal_blocks, select_terms
from kl_comedy.audit.report import AuditReport, BetaCheck, Estimate, TermResult
from kl_comedy.config import Config, load_config
from kl_comedy.errors import UserError
from kl_comedy.objective import sequence_weights
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored

BLOCKS = 8
WIDTH = 40


def gradients_of_blocks(count, *, seed, bias=0.0, own_noise=0.3):
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
    """The three Gram matrices [K, K] that every statistic is computed from."""
    return term @ term.T, term @ reference.T, reference @ reference.T


def mean_and_error(values):
    """The mean of the values and its standard error."""
    values = torch.tensor(values, dtype=torch.float64)
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def gram_statistics(bias):
    """Each statistic of 2,000 experiments whose term has the ``bias``, by its name."""
    values = {"square": [], "squared bias": [], "product": [], "noise": []}
    for term, reference in gradients_of_blocks(2000, seed=0, bias=bias):
        term_KK, shared_KK, reference_KK = grams(term, reference)
        difference_KK = statistics.difference_gram(term_KK, shared_KK, reference_KK)
        values["square"].append(float(statistics.mean_product(term_KK)))
        values["squared bias"].append(float(statistics.mean_product(difference_KK)))
        values["product"].append(float(statistics.mean_product(shared_KK)))
        values["noise"].append(float(statistics.noise(term_KK)))
    return values


@pytest.mark.parametrize("bias", [0.0, 0.5], ids=["unbiased term", "biased term"])
def test_squares_are_unbiased_though_both_gradients_share_their_completions(bias):
    # A square of a mean has the noise's variance in it, unless the products of a block with itself are left out.
    truths = {
        "square": 1 + bias**2,
        "squared bias": bias**2,
        "product": 1.0,
        "noise": WIDTH * (0.3**2 + 0.2**2),
    }
    for name, values in gram_statistics(bias).items():
        mean, error = mean_and_error(values)
        assert abs(mean - truths[name]) < 4 * error, (name, mean, truths[name], error)


def test_intervals_cover_what_they_estimate():
    experiments = 200
    truths = {"delivered": 1.0, "cosine": 1 / math.sqrt(1.25), "squared_bias": 0.25}
    covered = dict.fromkeys(truths, 0)
    for term, reference in gradients_of_blocks(experiments, seed=2, bias=0.5):
        term_KK, shared_KK, reference_KK = grams(term, reference)
        difference_KK = statistics.difference_gram(term_KK, shared_KK, reference_KK)
        estimates = {
            "delivered": statistics.estimate(statistics.delivered, shared_KK, reference_KK),
            "cosine": statistics.estimate(statistics.cosine, term_KK, shared_KK, reference_KK),
            "squared_bias": statistics.estimate(statistics.squared_bias, difference_KK, reference_KK),
        }
        for name, truth in truths.items():
            covered[name] += estimates[name].low <= truth <= estimates[name].high
    for name, count in covered.items():
        # 95 % intervals of the jackknife: 90 % leaves room for its error at 8 blocks.
        assert count / experiments > 0.9, (name, covered)


def share_rejected(bias):
    """The share of 400 experiments in which the sign-flip test finds a bias at 5 %."""
    generator = torch.Generator().manual_seed(0)
    rejections = []
    for term, reference in gradients_of_blocks(400, seed=3, bias=bias):
        difference_KK = statistics.difference_gram(*grams(term, reference))
        rejections.append(statistics.p_of_zero_mean(difference_KK, generator) < 0.05)
    return sum(rejections) / len(rejections)


def test_the_sign_flip_test_has_its_level():
    # 5 % with three standard errors of 400 experiments.
    assert 0.02 < share_rejected(bias=0.0) < 0.085


def test_the_sign_flip_test_detects_a_bias():
    assert share_rejected(bias=0.8) > 0.9


def test_a_cosine_without_a_norm_is_not_a_number():
    below_zero = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    assert math.isnan(float(statistics.cosine(below_zero, below_zero, torch.ones(3, 3))))


# --- sketch -------------------------------------------------------------------------------------------------------
def sketched(sketch, vector, cut=0):
    """The sketch of a vector in two parts, as two ranks hold it; with the default ``cut`` in one."""
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
    expected_width = dimension if sketch.exact else size
    assert sketch.width == expected_width
    assert whole.shape == (sketch.width,)
    assert torch.allclose(sketched(sketch, 2 * x - y), 2 * whole - sketched(sketch, y), atol=1e-4)
    assert torch.allclose(sketched(sketch, x, int(cut * dimension)), whole, atol=1e-4)
    if sketch.exact:
        assert torch.equal(whole, x)
    else:
        unit = torch.zeros(dimension)
        unit[seed % dimension] = 1.0
        assert sketched(sketch, unit).abs().sum() == 1.0, "every coordinate goes to one bucket"


def test_sketched_products_are_unbiased_and_as_precise_as_promised():
    dimension = 5000
    size = 256
    sketches = 400
    x, y = torch.randn(2, dimension, generator=torch.Generator().manual_seed(0))
    y = y + 0.5 * x
    products = []
    for seed in range(sketches):
        sketch = Sketch(dimension, size, torch.Generator().manual_seed(seed))
        products.append(float(sketched(sketch, x) @ sketched(sketch, y)))
    mean, error = mean_and_error(products)
    assert abs(mean - float(x @ y)) < 4 * error
    # A count sketch's standard deviation is at most |x| |y| sqrt(2 / size).
    deviation = error * math.sqrt(sketches)
    assert deviation < 1.1 * float(x.norm() * y.norm()) * math.sqrt(2 / size)


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
    """A causal LM in miniature: the decoder body is a module of its own."""

    def __init__(self, blocks, tied=False):
        super().__init__()
        self.model = Toy(blocks, tied)

    def get_input_embeddings(self):
        return self.model.embed

    def get_output_embeddings(self):
        return self.model.lm_head


LAYERED_MODELS = {
    "two blocks": (Causal(2), ["embeddings", "block 0", "block 1", "head"]),
    "tied embeddings": (Causal(2, tied=True), ["embeddings and head", "block 0", "block 1", "final norm"]),
    "thirteen blocks": (
        Causal(13),
        # At most six runs of blocks: three blocks each, and what is left.
        ["embeddings", "blocks 0-2", "blocks 3-5", "blocks 6-8", "blocks 9-11", "block 12", "head"],
    ),
}
layered_models = pytest.mark.parametrize(("model", "names"), LAYERED_MODELS.values(), ids=LAYERED_MODELS)


@layered_models
def test_every_trainable_parameter_is_in_one_layer_group(model, names):
    groups = layer_groups(model)
    assert list(groups) == names
    grouped = {id(parameter) for group in groups.values() for parameter in group}
    assert grouped == {id(parameter) for parameter in model.parameters()}


@layered_models
def test_a_parameter_without_a_gradient_counts_as_zeros(model, names):
    sketch = GradientSketch(layer_groups(model), 0)
    gradients = [torch.randn_like(parameter) for parameter in sketch.parameters]
    folded = sketch.fold([None, *gradients[1:]])
    first = gradients[0].numel()
    others = torch.cat([gradient.flatten() for gradient in gradients[1:]])
    assert torch.equal(torch.cat(folded)[first:], others)
    assert not folded[0][:first].any()


@layered_models
def test_a_frozen_parameter_is_in_no_layer_group(model, names):
    model.model.embed.weight.requires_grad_(False)
    try:
        grouped = sum(len(group) for group in layer_groups(model).values())
    finally:
        model.model.embed.weight.requires_grad_(True)
    assert grouped == len(list(model.parameters())) - 1


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
    for block in split:
        assert len(block) % size == 0
    used = [scored for block in split for scored in block]
    assert used == rows[: len(used)], "in their order"
    assert len(rows) - len(used) < len(split) * size, "no more is left over than one group per block"


@pytest.fixture(scope="module")
def config_of_two_terms():
    return load_config(
        None, ["kl=[{estimator: k3, placement: loss, beta: 0.2}, {estimator: k1, placement: loss, beta: 0.1}]"]
    )


def test_the_terms_to_audit_are_the_configs_first(config_of_two_terms):
    selected = select_terms(["panel", "grpo", "own"], config_of_two_terms, key="--terms")
    # The others are audited at the first term's beta.
    assert [(item.position, item.beta) for item in selected[:3]] == [(0, 0.2), (1, 0.1), (None, 0.2)]


def test_no_shape_of_a_term_is_audited_twice(config_of_two_terms):
    selected = select_terms(["panel", "grpo", "own"], config_of_two_terms, key="--terms")
    shapes = [replace(item.term, beta=1.0) for item in selected]
    assert len(shapes) == len(set(shapes))
    assert len(shapes) == len({item.key for item in selected})


def test_terms_with_a_ratio_are_left_out_on_policy(config_of_two_terms):
    """A ratio is 1 there, so that they equal those without."""
    for item in select_terms(["panel", "grpo", "own"], config_of_two_terms, key="--terms"):
        assert item.term.correction == "none", item.label


def test_terms_are_audited_at_the_betas_in_force(config_of_two_terms):
    betas = {"kl_0": 3.0, "kl_1": 4.0}
    selected = select_terms(["own"], config_of_two_terms, key="--terms", betas=betas)
    assert [item.beta for item in selected] == [3.0, 4.0]


def test_the_whole_panel_is_audited_off_policy():
    stale = load_config(None, ["kl=[]", "lag.mode=replayed", "lag.steps=2"])
    assert {item.term for item in select_terms(["panel"], stale, key="--terms")} == set(PANEL)


def test_an_unknown_term_is_refused_with_the_nearest(config_of_two_terms):
    with pytest.raises(UserError, match=r"--terms: got 'gpro'.*did you mean 'grpo'"):
        select_terms(["gpro"], config_of_two_terms, key="--terms")


CERTAIN = Estimate(value=1.0, low=0.9, high=1.1)
UNDEFINED = Estimate(value=math.nan, low=math.nan, high=math.nan)


def result_of(**changes):
    """The result of a term that is compared and has nothing wrong, with ``changes``."""
    layer = {"cosine": 1.0, "delivered": 1.0, "bias": math.nan}
    result = TermResult(
        key="kl_0",
        label="kl.0: a | b",
        position=0,
        beta=0.1,
        delivered=CERTAIN,
        cosine=CERTAIN,
        bias=CERTAIN,
        p_unbiased=0.5,
        p_no_mean=0.001,
        variance=1.0,
        kl_to_policy=0.5,
        silent_share=0.0,
        clamped_share=None,
        capped_share=None,
        layers={"embeddings": layer, "head": layer},
    )
    return replace(result, **changes)


INERT = BetaCheck(change=0.1, disagreement=0.0, inert=True, wrong=False)
WRONG = BetaCheck(change=0.1, disagreement=0.0, inert=False, wrong=True)


@pytest.mark.parametrize(
    ("change", "is_inert", "is_wrong"),
    [(1.0, False, False), (0.0, True, False), (3.0, False, True), (math.nan, False, True), (math.inf, False, True)],
)
def test_a_beta_without_effect_is_inert_and_one_with_another_effect_is_wrong(monkeypatch, change, is_inert, is_wrong):
    """Training's gradient is (1, beta * change), and that of the term alone (0, 1)."""
    config = load_config(None, ["kl=[{estimator: k2, placement: loss, beta: 0.5}]"])
    (item,) = select_terms(["own"], config, key="audit.terms")

    def gradient(module, rows, betas, sketch):
        return torch.tensor([1.0, betas[item.key] * change])

    monkeypatch.setattr(measure, "training_gradient", gradient)
    module = SimpleNamespace(beta_values={item.key: 0.5})
    check = measure.check_beta(module, [], item, torch.tensor([0.0, 1.0]), None)
    assert (check.inert, check.wrong) == (is_inert, is_wrong)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        pytest.param({}, "no bias found", id="nothing wrong"),
        pytest.param({"p_unbiased": 0.0004}, "biased (p < 0.001)", id="a tiny p"),
        pytest.param({"p_unbiased": 0.006}, "biased (p 0.006)", id="a small p"),
        # A panel has many terms: the level is 1 %, not 5 %.
        pytest.param({"p_unbiased": 0.02}, "no bias found", id="a p above the level"),
        pytest.param({"p_no_mean": 0.4, "p_unbiased": 0.001}, "no mean gradient found: noise", id="noise"),
        pytest.param({"bias": UNDEFINED}, "no reference gradient to compare with", id="no reference"),
        pytest.param({"check": INERT}, "INERT: beta does not change the gradient", id="inert"),
        pytest.param({"check": WRONG}, "WRONG: training follows another gradient", id="wrong"),
    ],
)
def test_verdicts(changes, verdict):
    assert result_of(**changes).verdict == verdict


# --- the KL terms' part of the update -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def update_with_a_spike():
    """Gram matrices of 8 updates, each the policy's part (2 along one axis) and half the reference gradient.

    The first update has 1,000 along the reference gradient in place of a half.
    """
    reference = torch.eye(WIDTH, dtype=torch.float64)[:1].expand(BLOCKS, WIDTH)
    policy = torch.zeros(BLOCKS, WIDTH, dtype=torch.float64)
    policy[:, 1] = 2.0
    update = policy + 0.5 * reference
    update[0, 0] = 1000.0
    return (
        update @ update.T,
        policy @ policy.T,
        update @ reference.T,
        policy @ reference.T,
        reference @ reference.T,
    )


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_without_a_bound_the_projection_is_of_the_whole_updates(update_with_a_spike, scale):
    projection = statistics.kl_projection(*update_with_a_spike, scale=scale, bound=math.inf)
    # The mean along the reference gradient, over the norm 2 of the policy's part.
    assert float(projection) == pytest.approx((1000.0 + 7 * 0.5) / 8 / 2.0)


def test_the_projection_is_of_updates_clipped_as_training_clips_them(update_with_a_spike):
    """The update with a spike counts as much as the bound lets through."""
    projection = statistics.kl_projection(*update_with_a_spike, scale=1.0, bound=3.0)
    # Only the spike is longer than 3: it is scaled to norm 3, and its part along the reference with it.
    clipped_spike = 3.0 * 1000 / math.hypot(1000, 2)
    assert float(projection) == pytest.approx((clipped_spike + 7 * 0.5) / 8 / 2.0)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_without_a_reference_gradient_there_is_no_projection(update_with_a_spike, scale):
    *grams_of_updates, reference_KK = update_with_a_spike
    projection = statistics.kl_projection(*grams_of_updates, 0 * reference_KK, scale=scale, bound=3.0)
    assert math.isnan(projection)


# --- the report ---------------------------------------------------------------------------------------------------
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
        kl_projection=UNDEFINED,
        sketch=0,
        seconds=1.0,
        terms=[],
    )
    return replace(report, **changes)


AWAY = Estimate(value=-0.3, low=-0.4, high=-0.1)


def test_a_warning_where_the_kl_terms_drive_the_policy_away():
    report = report_of(kl_projection=AWAY)
    assert "away from the reference" in report.drives_away
    assert "-0.3 [-0.4, -0.1]" in report.headline()


@pytest.mark.parametrize("projection", [replace(AWAY, high=0.1), UNDEFINED], ids=["perhaps 0", "undefined"])
def test_no_warning_where_the_kl_terms_may_not_drive_the_policy_away(projection):
    assert not report_of(kl_projection=projection).drives_away


@pytest.fixture(scope="module")
def report_with_undefined_values():
    undefined = result_of(cosine=None, delivered=UNDEFINED, bias=UNDEFINED, label="other")
    return report_of(terms=[result_of(), undefined])


@pytest.mark.parametrize("format", ["table", "markdown", "csv", "json"])
def test_what_is_undefined_is_left_empty(report_with_undefined_values, format):
    text = report_with_undefined_values.render(format)
    assert "nan" not in text.lower()
    assert "other" in text, "the term is in the report all the same"


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_a_report_for_reading_says_what_was_clipped_and_hidden(report_with_undefined_values, format):
    text = report_with_undefined_values.render(format)
    assert "clipped at 10.0% of tokens" in text
    assert "hidden by noise" in text


def test_a_bar_in_a_label_is_escaped_in_markdown(report_with_undefined_values):
    assert "a \\| b" in report_with_undefined_values.render("markdown")


@pytest.mark.parametrize("rows", [16, 8, 2], ids="{} rows".format)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_token_mean", "sequence_sum"])
def test_the_bound_of_clipping_does_not_depend_on_the_size_of_a_block(reduction, rows):
    """A gradient of training is the weights' sum times the mean, whatever part of an update the mean is over."""
    config = Config()
    config.optimizer.clip_norm = 0.7

    def weight_of(rows):
        """The sum of the weights of so many completions of five tokens."""
        mask_BT = torch.ones(rows, 5, dtype=torch.bool)
        return float(sequence_weights(reduction, mask_BT, constant=3.0).sum())

    bound_of_a_block = measure._clip_bound(config, weight_of(rows))
    # The gradient of an update of 16, which training clips at 0.7, is its sum of weights times the mean.
    assert bound_of_a_block * weight_of(16) == pytest.approx(0.7)
