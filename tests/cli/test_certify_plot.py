"""The picture of certificates: where its marks and curves are, which share one, and the looks of their KL families."""

from types import SimpleNamespace

import pytest

from kl_comedy.cli import certify_plot
from kl_comedy.cli.certify_plot import FLOOR, _biases_by_length, _Configuration, _looks, plot_certificates
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.kl.recipes import resolve_terms
from kl_comedy.kl.term import KLTerm
from kl_comedy.results.looks import family_look


def group(name, *terms):
    """A group of one configuration, with what its look depends on."""
    return [_Configuration(name=name, certificates=[SimpleNamespace(terms=terms)])]


def test_a_configuration_has_the_colour_and_marker_of_its_family():
    both = (KLTerm("k3", placement="loss", beta=0.1), KLTerm("k1", placement="loss", beta=0.1))
    groups = [group("mine", *both), group("grpo", *resolve_terms("grpo")), group("k1", *both[1:])]
    expected = [family_look(f"{part}_reverse_token in loss") for part in ("k3", "k1")]
    for looks in (_looks(groups), _looks(list(reversed(groups)))[::-1]):
        assert [(style.colour, style.marker) for style in looks[1:]] == [(f.colour, f.marker) for f in expected]
        assert len({style.colour for style in looks}) == 3


def test_configurations_of_one_family_differ_in_line_style():
    terms = (KLTerm("k3", placement="loss", beta=0.1), KLTerm("k1", placement="loss", beta=0.1))
    weighted = (KLTerm("k3", placement="loss", beta=0.3), KLTerm("k1", placement="loss", beta=0.1))
    equal, other, alone = _looks([group("equal", *terms), group("weighted", *weighted), group("k3", terms[0])])
    assert equal.colour == other.colour
    assert equal.colour != alone.colour
    assert equal.dash != other.dash


# --- bias by length ---------------------------------------------------------------------------------------------------
K1_IN_LOSS = KLTerm("k1", placement="loss", beta=0.1)
K3_IN_LOSS = KLTerm("k3", placement="loss", beta=1.0)
WEAK_K3 = KLTerm("k3", placement="loss", beta=0.05)
EXACT = KLTerm("exact", placement="reward", beta=0.3)


@pytest.fixture
def lengths(monkeypatch):
    """The curve of short completions alone, which are enumerated in milliseconds."""
    monkeypatch.setattr(certify_plot, "LENGTHS", (2, 4))
    return (2, 4)


def test_the_curve_is_the_relative_bias_at_each_length(lengths):
    (curve,) = _biases_by_length({"k3": [K3_IN_LOSS]}).values()
    expected = []
    for length in lengths:
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        instance = Instance.random(tree, InstanceSettings(regime="on_policy", seed=0, parameters=6, distance=0.5))
        target_D = target_gradient(instance, "sequence_reverse")
        difference_D = expected_gradient(instance, [K3_IN_LOSS]).gradient_D - target_D
        expected.append(float(difference_D.norm() / target_D.norm()))
    assert curve == pytest.approx(expected)
    assert curve[0] != pytest.approx(curve[1])


def test_no_gradient_is_a_bias_of_one_and_a_beta_is_no_bias(lengths):
    curves = _biases_by_length({"zero": [K1_IN_LOSS], "exact": [EXACT], "k3": [K3_IN_LOSS], "weak k3": [WEAK_K3]})
    assert curves["zero"] == pytest.approx([1.0, 1.0])
    assert curves["exact"] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert curves["weak k3"] == pytest.approx(curves["k3"])


# --- marks ------------------------------------------------------------------------------------------------------------
def certificate(name, regime, bias, variance, term=K3_IN_LOSS):
    others = {"token_reverse": 0.77, "sequence_reverse": bias}
    return SimpleNamespace(
        name=name, regime=regime, relative_bias=others, variance=variance, terms=(term,), stated="sequence_reverse"
    )


@pytest.fixture
def drawn(monkeypatch, tmp_path, lengths):
    """Draw certificates; the figure."""
    figures = []
    monkeypatch.setattr(certify_plot, "save_figure", lambda figure, path: figures.append(figure))

    def draw(*certificates):
        plot_certificates(certificates, tmp_path / "plane.svg")
        return figures[-1]

    return draw


def marks(axes):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]


def test_a_mark_is_at_the_bias_and_the_variance_of_its_regime(drawn):
    figure = drawn(certificate("k3", "on_policy", 0.2, 3.0), certificate("k3", "off_policy", 0.4, 5.0))
    on_policy, off_policy = figure.axes[:2]
    titles = [axes.get_title(loc="left") for axes in (on_policy, off_policy)]
    assert titles == [
        "Bias and variance, on-policy",
        "Bias and variance, off-policy",
    ]
    assert marks(on_policy) == [([0.2], [3.0])]
    assert marks(off_policy) == [([0.4], [5.0])]


def test_an_unbiased_configuration_is_drawn_at_the_left_edge(drawn):
    figure = drawn(certificate("k3", "on_policy", 1e-17, 3.0))
    assert marks(figure.axes[0]) == [([FLOOR], [3.0])]


def test_what_looks_equal_everywhere_shares_one_mark_and_names_two(drawn):
    equal = [certificate(name, "on_policy", 0.2, 3.0) for name in ("a", "b", "c", "d")]
    # Its mark is theirs, and its curve is not.
    other_curve = certificate("e", "on_policy", 0.2, 3.0, term=K1_IN_LOSS)
    figure = drawn(*equal, other_curve)
    assert marks(figure.axes[0]) == [([0.2], [3.0])] * 2
    labels = figure.axes[1].get_legend_handles_labels()[1]
    assert labels == ["a, b +2", "e"]
