"""The figure of a claim, read from its SVG: levels before differences, looks of families, no interval of few seeds."""

from research.studies.claim_figures import draw

from svg_texts import texts_of, tree_of


def row(contrast, forms, *, at="learning rate 0.0001", pairs=5, a=0.5, b=0.4):
    """A contrast of two rewards with an interval; the first side's interval reaches above 1."""
    levels = {"a": a, "b": b, "a_low": a - 0.1, "a_high": 1.4, "b_low": b - 0.1, "b_high": b + 0.1}
    difference = {"difference": a - b, "low": 0.05, "high": 0.15, "decision": ""}
    return {"contrast": contrast, "forms": forms, "at": at, "outcome": "end", "pairs": pairs, **levels, **difference}


def words_and_paths(rows, folder):
    draw(rows, folder / "claim.svg")
    svg = (folder / "claim.svg").read_text()
    return texts_of(tree_of(svg)), svg


FIRST = row("k1 in reward - k3 in loss", ("k1 in reward", "k3 in loss"))
SECOND = row("k1 in reward - no KL", ("k1 in reward", "no KL"), b=0.3)


def test_levels_stand_above_their_differences(tmp_path):
    words, _ = words_and_paths([FIRST, SECOND], tmp_path)
    assert words.index("held-out reward, end") < words.index("difference")
    title = " ".join(words)
    assert "means of 5 seeds" in title
    # Each form has an entry of its own beside the contrasts.
    assert {"k1 in reward", "k3 in loss", "no KL"} <= set(words)
