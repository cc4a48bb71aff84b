"""Over which keys lines are spread, and which keys become panels."""

import pytest

from kl_comedy.results.compare import groups_of
from kl_comedy.results.plots import MOST_LINES, lines_and_panels
from plotted_runs import BETA, FAMILY, LABEL, LR, study


@pytest.mark.parametrize(
    ("frame", "lines", "panels"),
    [
        (study(), [FAMILY], [LR, BETA]),
        (study(betas=("0.05", "0.1", "0.2", "1.0"), rates=("0.1",)), [BETA], [FAMILY]),
        (study(betas=("0.1",)), [LR, LABEL], []),
        (study(betas=("0.1",), rates=("1", "2", "3")), [FAMILY], [LR]),
    ],
    ids=["rates and betas", "one rate", "eight lines", "one beta"],
)
def test_more_lines_than_eight_are_spread_over_panels(frame, lines, panels):
    assert lines_and_panels(frame, [LR, LABEL]) == (lines, panels)
    too_many_lines = len(groups_of(frame, [LR, LABEL])) > MOST_LINES
    assert bool(panels) == too_many_lines


def test_names_that_separate_what_no_other_key_does_are_not_pooled():
    assert lines_and_panels(study(), ["params.name", LABEL]) == (["params.name", LABEL], [])
    _, panels = lines_and_panels(study(), ["params.name", LR, LABEL])
    assert panels == [LR, BETA]
