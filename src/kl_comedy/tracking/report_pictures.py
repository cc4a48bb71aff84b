"""The pictures of a report, as data of SVG images: learning curves, and the first metric against KL."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kl_comedy.tracking.derived import BETA, FAMILY, LABEL
from kl_comedy.tracking.panels import NAME, of_many
from kl_comedy.tracking.plots import draw_panels
from kl_comedy.tracking.queries import short

if TYPE_CHECKING:
    import pandas as pd


def part_pictures(
    frame: pd.DataFrame, groups: Sequence[str], points: Mapping[str, pd.DataFrame], metrics: Sequence[str],
    kl: str | None, parts: Sequence[str],
) -> Iterable[Mapping[str, str]]:  # fmt: skip
    """Curves of the metrics recorded more than twice (a beginning and an end are in the table), then the frontier."""
    kl_keys = (LABEL, BETA, FAMILY)
    own = [group for group in groups if group in kl_keys or (group not in parts and frame[group].nunique() > 1)]
    lines, panels = of_many(frame, own)
    for metric in metrics:
        curve = points[metric][points[metric]["run_id"].isin(list(frame["run_id"]))]
        if curve["value"].notna().any() and curve["step"].nunique() > 2:
            figure = draw_panels({short(metric): curve}, frame, lines, panels=panels)
            yield {"alt": f"{short(metric)} over updates: mean and 95% band over seeds", "data": _svg(figure)}
    first = [metric for metric in metrics[:1] if metric != kl]
    if kl is not None and FAMILY in frame and first and (frame[first[0]].notna() & frame[kl].notna()).any():
        from kl_comedy.tracking.pictures import frontier

        kept = [group for group in own if group not in (*kl_keys, NAME)]
        figure = frontier(frame, [FAMILY, *kept], [short(first[0])], kl)
        yield {"alt": f"{short(first[0])} against {short(kl)}: one line a KL family, hollow where runs collapsed",
               "data": _svg(figure)}  # fmt: skip


def _svg(figure: Any) -> str:
    """The figure as base64 of SVG, coordinates to a hundredth of a point: half the size, no visible difference."""
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kl_comedy", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = re.sub(r' d="[^"]*"', lambda found: _rounded(found[0]), out.getvalue().decode("utf-8"))
    return base64.b64encode(text.encode("utf-8")).decode("ascii")


def _rounded(path: str) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", path)
