"""The looks of configurations in the picture of certificates: those of their KL families in every figure."""

from types import SimpleNamespace

from kl_comedy.kl.recipes import resolve_terms
from kl_comedy.kl.term import KLTerm
from kl_comedy.lab.certificate_plot import _Configuration, _looks
from kl_comedy.tracking.looks import family_look


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
