"""The heat map of KL families by beta."""

from kl_comedy.results.plots import heatmap
from plotted_runs import BETA, study


def test_the_heat_map_has_one_row_without_kl():
    frame = study(rates=("0.1",)).iloc[:-1]
    frame = frame.assign(collapsed=False, **{"metrics.r": [number / 10 for number in range(len(frame))]})
    axes = heatmap(frame, ["r"], [BETA]).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert len(texts) == 10
    assert texts.count("0.9\nn=1") == 1
    assert "0.5\nn=2" in texts
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert sorted(rows) == ["k1 in loss", "k1 in reward total", "k3 in loss", "no KL"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.05", "0.1", "1.0"]
