"""What axes and heads of columns say of a metric, and the range of its values."""

import math
import re
from pathlib import Path

import pytest

from kl_comedy.results.metric_labels import LABELS, axis_label, column_head, metric_label, metric_range


def test_axes_say_every_documented_metric_in_words_with_its_unit():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| .* \| (.*) \|$", page, flags=re.MULTILINE)
    documented = [(name, unit) for name, unit in rows if name.startswith("eval/<") or "/<name>" not in name]
    assert len(documented) > 90
    for name, unit in documented:
        if name.endswith("/<name>"):
            continue
        example = name.replace("<set>", "heldout").replace("<level>", "sequence").replace("<k>", "k1")
        label, unit_of_label = metric_label(re.sub(r"<[a-z]+>", "1", example))
        label_of_unknown_metric = example.replace("_", " ").replace("/", ": ")
        assert label != label_of_unknown_metric, name
        # Slashes are allowed in ratios of probabilities only.
        assert not re.search(r"[_<>/](?!π|ref|μ)", label.replace("π/", "")), name
        for measure in ("nats", "s", "tokens", "tokens/s"):
            if re.match(rf"{measure}\b(?!/)", unit):
                assert unit_of_label.startswith(measure), (name, unit, unit_of_label)
    assert axis_label("eval/two_digits/policy/entropy") == "policy entropy on two digits\nper token (nats)"
    assert metric_label("train/reward/x/score") == ("training reward: x/score", "per completion")
    assert len(LABELS) < len(documented) + 6, "hardly a label is of a metric that is not documented"


def test_heads_of_columns_have_the_unit_that_a_reader_needs():
    assert column_head("eval/heldout/reward") == "held-out reward"
    assert column_head("kl/exact_reverse_token") == "exact KL(π‖ref) per token (nats)"
    assert column_head("train/length") == "completion length (tokens)"
    assert column_head("train/truncated_share") == "truncated completions"


@pytest.mark.parametrize(
    ("metric", "values", "bounds"),
    [
        ("eval/heldout/reward", [0.2], (0.0, 1.0)),
        ("train/reward", [-1.0, 0.5], (-math.inf, math.inf)),
        ("train/truncated_share", [], (0.0, 1.0)),
        ("value/explained_variance", [], (-math.inf, math.inf)),
        ("eval/heldout/kl/exact_reverse_sequence", [-1e-9, 3.0], (0.0, math.inf)),
        ("kl/k3_reverse_token", [], (0.0, math.inf)),
        ("kl/k1_reverse_token", [], (-math.inf, math.inf)),
        ("kl_error/k3_reverse_token", [], (-math.inf, math.inf)),
        ("my/metric", [], (-math.inf, math.inf)),
    ],
)
def test_the_range_of_a_metric(metric, values, bounds):
    """A reward of another scale shows itself in its values; a KL of -1e-9 is rounding."""
    assert metric_range(metric, values) == bounds
