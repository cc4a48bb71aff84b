"""Print the tables of a page of results/ again, from the data stored beside it.

python research/scripts/stored_tables.py values

`kl-comedy results verify results` runs this for the pages that name it, and compares every cell. It runs no study and
measures nothing.

The modules that draw each page are imported by its function: pages of bench/ need other packages than those of studies.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
# The studies are a package of the root; the modules of bench/ and of this folder import each other by their bare names.
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "research" / "scripts")]


def read_json(name: str) -> Any:
    """A JSON file of results/."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def study_data(name: str) -> pd.DataFrame:
    """The data of a study in results/."""
    from research.studies.pages import read_frame

    return read_frame(RESULTS / name)


# --- pages of research/studies --------------------------------------------------------------------------------------
# `command` is what a page says first. It is no table, so that verify does not compare it: these pages leave it empty.


def values() -> str:
    from research.studies.pages import markdown
    from research.studies.values import error_table, gaussian_table

    errors = markdown(error_table(study_data("values/errors.parquet")))
    return f"{errors}\n\n{markdown(gaussian_table())}"


def open_problem() -> str:
    from research.studies.open_problem import parts
    from research.studies.pages import page

    frame = study_data("open_problem/open_problem.parquet")
    lambdas = study_data("open_problem/k_lambda.parquet")
    return page(parts(frame, lambdas, command=""))


def open_problem_comparisons() -> str:
    from research.studies.open_problem import comparison_table
    from research.studies.pages import markdown

    return markdown(comparison_table(study_data("open_problem/open_problem.parquet")))


def policy_corrections() -> str:
    from research.studies.pages import page
    from research.studies.policy_corrections import parts

    return page(parts(study_data("policy_corrections/policy_corrections.parquet"), command=""))


def synthetic(part: str) -> str:
    from research.studies.synthetic import stored_tables

    return stored_tables(part, RESULTS / "synthetic")


# --- pages of bench/ ------------------------------------------------------------------------------------------------


def speed() -> str:
    from speed.report import page

    return page(read_json("speed/speed.json"))


def speed_redesign() -> str:
    from speed.report import page

    return page(read_json("speed/redesign/speed.json"))


def speed_one_thread() -> str:
    from speed.report import page

    return page(read_json("speed/one_thread/speed.json"))


def audit_cost() -> str:
    from audit_cost import page

    data = read_json("speed/audit_cost.json")
    return page(data["command"], data["config"], data["measurements"])


def answer_times() -> str:
    from answer_times import page

    return page(read_json("speed/answer_times.json"))


def growth() -> str:
    from growth import table

    rows = []
    with (RESULTS / "speed/growth.csv").open() as file:
        for row in csv.DictReader(file):
            # A measurement that was not made is an empty cell.
            numbers = {name: float(text or "nan") for name, text in row.items() if name != "axis"}
            rows.append({**row, **numbers, "value": int(numbers["value"])})
    return table(rows)


def peers() -> str:
    from peers.report import markdown

    data = read_json("peers/peers.json")
    return markdown(data["rows"], data["skipped"])


def register() -> str:
    from register.page import generated

    return generated(read_json("register/register.json"), read_json("register/by_hand.json"))


def harness() -> str:
    from argparse import Namespace

    from harness_agreement import page

    data = read_json("harness/agreement.json")
    arguments = Namespace(tokens=0, model=data.get("model", ""))
    return page(data["suites"], data["versions"], arguments)


def plan() -> str:
    from plan import page

    return page(read_json("plan/plan.json"))


def scaling() -> str:
    from scaling import page

    return page(read_json("scaling/scaling.json"))


def weights() -> str:
    import merged_adapter
    import weights_path

    transports = weights_path.table(read_json("weights/vllm_server.json"))
    adapters = merged_adapter.table(read_json("weights/merged_adapter.json"))
    return f"{transports}\n\n{adapters}"


# --- pages without a maker of their own -----------------------------------------------------------------------------


def overlap() -> str:
    """How much of an asynchronous step's parts overlaps, per round and as a median."""
    columns = {
        "overlap": "async step / larger synchronous part",
        "own_overlap": "async step / larger of its own parts",
        "speed_up": "synchronous / async step",
        "best_speed_up": "sum of the parts / larger part",
    }
    data = read_json("overlap/overlap.json")
    lines = [
        "| round | " + " | ".join(columns.values()) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for number, measured in enumerate(data["rounds"], start=1):
        lines.append(_overlap_line(str(number), [measured[name] for name in columns]))
    lines.append(_overlap_line("median", [data[f"median_{name}"] for name in columns]))
    return "\n".join(lines)


def _overlap_line(name: str, ratios: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |"


def read_lags() -> list[dict[str, Any]]:
    """The rows of lags/runs.csv, with numbers where the columns hold numbers."""
    with (RESULTS / "lags/runs.csv").open() as file:
        return [_typed_lag(row) for row in csv.DictReader(file)]


def _typed_lag(row: dict[str, str]) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for name, text in row.items():
        if name in ("name", "kl", "config_hash", "commit", "dirty"):
            typed[name] = text
        elif name in ("seed", "lag", "updates", "heldout_update"):
            typed[name] = int(text)
        elif name == "collapsed":
            typed[name] = text == "True"
        else:
            typed[name] = float(text)
    return typed


def advice() -> str:
    """What training showed of each advice, measured from the exports anew."""
    from doc_tables.advice import evidence, ranges
    from research.studies.advice import measure

    from kl_comedy.peers.advice import read_advice

    table = read_advice()
    measured = measure(table)
    return f"{ranges(measured)}\n\n{evidence(table, measured)}"


def advice_forms() -> str:
    """The table of README.md."""
    from doc_tables.advice import forms

    return forms()


def centring_prediction() -> str:
    """The prediction in the protocol of December 2026: the share of policies that collapsed, by lag and arm."""
    columns = {
        "exact-c0": "exact, c = 0",
        "exact-c0.5": "c = 0.5",
        "exact-c1": "c = 1",
        "exact-c1.5": "c = 1.5",
        "exact-score": "score centred",
        "k1-c0": "k1 to go, c = 0",
        "k1-c1": "c = 1",
        "none": "no KL",
    }
    shares = {}
    for row in read_json("evidence/centring_prediction.json")["sgd"]["rows"]:
        shares[row["lag"], row["arm"]] = row["collapsed"]
    lines = [["lag", *columns.values()], ["---:"] * (len(columns) + 1)]
    for lag in (4, 10, 20):
        lines.append([str(lag), *[f"{shares[lag, arm]:.2f}" for arm in columns]])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def lags() -> str:
    from lag_table import table

    return table(read_lags())


def lags_heldout() -> str:
    """Means with Student's interval, as `kl-comedy results table` prints them."""
    from kl_comedy.results.runs import family_of, sort_key
    from kl_comedy.results.tables import markdown

    def order(run: dict[str, Any]) -> tuple[Any, ...]:
        return run["lag"], *map(sort_key, family_of(run["kl"]))

    rows = []
    for _, group in itertools.groupby(sorted(read_lags(), key=order), key=order):
        runs = list(group)
        count = str(len(runs))
        reward = _mean_cell([run["heldout_reward"] for run in runs])
        exact_kl = _mean_cell([run["heldout_exact_kl"] for run in runs])
        collapsed = sum(run["collapsed"] for run in runs)
        # The file has no status: all runs count in the means, and none of them failed.
        rows.append([str(runs[0]["lag"]), runs[0]["kl"], count, reward, exact_kl, count, "0", str(collapsed)])
    metrics = ("eval/heldout/reward", "eval/heldout/kl/exact_reverse_sequence")
    return markdown(["lag.steps", "kl.label", "n", *metrics, "runs", "failed", "collapsed"], rows)


def quickstart() -> str:
    """The quickstart's row of results/shipped_configs, from its runs.csv."""
    import pandas as pd

    from kl_comedy.results.tables import markdown

    runs = pd.read_csv(RESULTS / "shipped_configs/runs.csv")
    runs = runs[runs["name"] == "quickstart"]
    metrics = ["eval/heldout/reward", "train/reward", "kl/exact_reverse_sequence"]
    means = [_mean_cell(list(runs[name])) for name in metrics]
    row = ["quickstart", runs["kl.label"].iloc[0], str(len(runs)), *means]
    return markdown(["name", "kl.label", "n", *metrics], [row])


def _mean_cell(values: list[float]) -> str:
    """The mean with its interval over seeds."""
    from kl_comedy.results.tables import number
    from kl_comedy.statistics import interval

    mean = interval(values)
    return f"{number(mean.mean)} [{number(mean.low)}, {number(mean.high)}]"


def forms() -> str:
    from readme_figure import tables

    return tables()


PAGES: dict[str, Callable[[], str]] = {
    "forms": forms,
    "values": values,
    "open_problem": open_problem,
    "open_problem_comparisons": open_problem_comparisons,
    "centring_prediction": centring_prediction,
    "policy_corrections": policy_corrections,
    "speed": speed,
    "speed_redesign": speed_redesign,
    "speed_one_thread": speed_one_thread,
    "audit_cost": audit_cost,
    "answer_times": answer_times,
    "growth": growth,
    "peers": peers,
    "register": register,
    "harness": harness,
    "overlap": overlap,
    "plan": plan,
    "scaling": scaling,
    "weights": weights,
    "advice": advice,
    "advice_forms": advice_forms,
    "lags": lags,
    "lags_heldout": lags_heldout,
    "quickstart": quickstart,
    "synthetic_length": partial(synthetic, "length"),
    "synthetic_distance": partial(synthetic, "distance"),
    "synthetic_optimum": partial(synthetic, "optimum"),
    "synthetic_modes": partial(synthetic, "modes"),
}
"""What each page's command names; the pages of results/ carry these names."""

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PAGES:
        sys.exit(f"error: allowed: one of {', '.join(PAGES)}")
    print(PAGES[sys.argv[1]]())
