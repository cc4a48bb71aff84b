"""Print the tables of a page of results/ again, from the data stored beside it.

python research/scripts/stored_tables.py values

`kl-comedy results verify results` runs this for the pages that name it, and compares every cell. It runs no study and
measures nothing.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "research" / "scripts")]


def stored(name: str) -> Any:
    """A JSON file of results/."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def frame(name: str) -> Any:
    """A CSV file of results/, whose texts may be called "none"."""
    import pandas as pd

    return pd.read_csv(RESULTS / name)


def values() -> str:
    from research.studies.pages import markdown
    from research.studies.values import error_table, gaussian_table

    return "\n\n".join(map(markdown, (error_table(frame("values/errors.csv")), gaussian_table())))


def open_problem() -> str:
    from research.studies.open_problem import parts
    from research.studies.pages import page

    return page(parts(frame("open_problem/open_problem.csv"), frame("open_problem/k_lambda.csv"), command=""))


def policy_corrections() -> str:
    from research.studies.pages import page
    from research.studies.policy_corrections import parts

    return page(parts(frame("policy_corrections/policy_corrections.csv"), command=""))


def discount() -> str:
    from research.studies.discount import parts
    from research.studies.pages import page

    return page(parts(frame("discount/discount.csv"), command=""))


def baselines() -> str:
    from research.studies.baselines import parts
    from research.studies.pages import page

    return page(parts(frame("baselines/baselines.csv"), command=""))


def topk() -> str:
    from research.studies.pages import page
    from research.studies.topk import parts

    forms = frame("topk/forms.csv").fillna({"target": "-", "tokens": ""})
    return page(parts(forms, frame("topk/scaling.csv"), frame("topk/cost.csv"), command=""))


def long_audit() -> str:
    from research.studies.long_audit import parts
    from research.studies.pages import page

    return page(parts(RESULTS / "long_audit", command=""))


def predictor() -> str:
    from research.studies.predictor import tables

    return tables(frame("predictor/configurations.csv"), frame("predictor/scores.csv"), command="")


def synthetic(part: str) -> str:
    from research.studies.synthetic import stored_tables

    return stored_tables(part, RESULTS / "synthetic")


def speed() -> str:
    from speed.report import page

    return page(stored("speed/speed.json"))


def speed_redesign() -> str:
    from speed.report import page

    return page(stored("speed/redesign/speed.json"))


def audit_cost() -> str:
    from audit_cost import page

    data = stored("speed/audit_cost.json")
    return page(data["command"], data["config"], data["measurements"])


def growth() -> str:
    from growth import table

    with (RESULTS / "speed/growth.csv").open() as file:
        rows = [
            {name: text if name == "axis" else float(text or "nan") for name, text in row.items()}
            for row in csv.DictReader(file)
        ]
    return table([row | {"value": int(row["value"])} for row in rows])


def peers() -> str:
    from peers.report import markdown

    data = stored("peers/peers.json")
    return markdown(data["rows"], data["skipped"])


def harness() -> str:
    from argparse import Namespace

    from harness_agreement import page

    data = stored("harness/agreement.json")
    return page(data["suites"], data["versions"], Namespace(tokens=0, model=data.get("model", "")))


def overlap() -> str:
    names = ("overlap", "own_overlap", "speed_up", "best_speed_up")
    data = stored("overlap/overlap.json")
    rows = [(str(at), *(row[name] for name in names)) for at, row in enumerate(data["rounds"], start=1)]
    rows.append(("median", *(data[f"median_{name}"] for name in names)))
    head = "| round | async step / larger synchronous part | async step / larger of its own parts "
    head += "| synchronous / async step | sum of the parts / larger part |\n|---|---|---|---|---|"
    return "\n".join([head, *(f"| {name} | {' | '.join(f'{value:.3f}' for value in each)} |" for name, *each in rows)])


def plan() -> str:
    from plan import page

    return page(stored("plan/plan.json"))


def scaling() -> str:
    from scaling import page

    return page(stored("scaling/scaling.json"))


def weights() -> str:
    import merged_adapter
    import weights_path

    transports = weights_path.table(stored("weights/vllm_server.json"))
    return f"{transports}\n\n{merged_adapter.table(stored('weights/merged_adapter.json'))}"


def lags() -> str:
    from lag_table import table

    with (RESULTS / "lags/runs.csv").open() as file:
        return table([read_lag(row) for row in csv.DictReader(file)])


def read_lag(row: dict[str, str]) -> dict[str, Any]:
    """A row of lags/runs.csv with its numbers; the other columns are texts."""
    texts = ("name", "kl", "config_hash", "commit", "dirty")
    numbers = {name: float(text) for name, text in row.items() if name not in (*texts, "collapsed")}
    whole = {name: int(row[name]) for name in ("seed", "lag", "updates", "heldout_update")}
    return {**row, **numbers, **whole, "collapsed": row["collapsed"] == "True"}


def lags_heldout() -> str:
    """Means with Student's interval, as `kl-comedy results table` prints them."""
    from kl_comedy.statistics import interval
    from kl_comedy.tracking.runs import family_of, sort_key
    from kl_comedy.tracking.tables import markdown, number

    with (RESULTS / "lags/runs.csv").open() as file:
        runs = [read_lag(row) for row in csv.DictReader(file)]

    def cell(values: list[float]) -> str:
        mean = interval(values)
        return f"{number(mean.mean)} [{number(mean.low)}, {number(mean.high)}]"

    def order(run: dict[str, Any]) -> Any:
        return run["lag"], *map(sort_key, family_of(run["kl"]))

    rows = []
    for _, group in itertools.groupby(sorted(runs, key=order), key=order):
        here = list(group)
        cells = [cell([run[name] for run in here]) for name in ("heldout_reward", "heldout_exact_kl")]
        collapsed = sum(run["collapsed"] for run in here)
        rows.append([str(here[0]["lag"]), here[0]["kl"], str(len(here)), *cells, str(len(here)), "0", str(collapsed)])
    metrics = ("eval/heldout/reward", "eval/heldout/kl/exact_reverse_sequence")
    return markdown(["lag.steps", "kl.label", "n", *metrics, "runs", "failed", "collapsed"], rows)


def quickstart() -> str:
    """The quickstart's row of results/README.md, from results/runs.csv."""
    from kl_comedy.statistics import interval
    from kl_comedy.tracking.tables import markdown, number

    runs = frame("runs.csv")
    runs = runs[runs["name"] == "quickstart"]
    metrics = ["eval/heldout/reward", "train/reward", "kl/exact_reverse_sequence"]
    means = [interval(list(runs[name])) for name in metrics]
    cells = [f"{number(each.mean)} [{number(each.low)}, {number(each.high)}]" for each in means]
    row = ["quickstart", runs["kl.label"].iloc[0], str(len(runs)), *cells]
    return markdown(["name", "kl.label", "n", *metrics], [row])


PAGES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        *(
            values,
            open_problem,
            discount,
            baselines,
            topk,
            long_audit,
            predictor,
            policy_corrections,
            speed,
            speed_redesign,
            audit_cost,
            growth,
            peers,
        ),
        *(harness, overlap, plan, scaling, weights, lags, lags_heldout, quickstart),
    )
} | {f"synthetic_{part}": partial(synthetic, part) for part in ("length", "distance", "optimum", "modes")}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PAGES:
        sys.exit(f"error: allowed: one of {', '.join(PAGES)}")
    print(PAGES[sys.argv[1]]())
