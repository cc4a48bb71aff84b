"""The notebook reaches the headline table in ten lines: on the export in results/, and on any store."""

import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from kl_comedy.tracking.logger import RunLogger

NOTEBOOK = Path(__file__).parents[2] / "examples" / "results.ipynb"


def code_of(cells):
    """The only cell with code."""
    (cell,) = [cell for cell in cells if cell["cell_type"] == "code"]
    return cell


def output_of(cell):
    """What the value of the cell's last line was shown as."""
    (output,) = [output for output in cell["outputs"] if output["output_type"] == "execute_result"]
    return output["data"]["text/plain"]


CODE = code_of(json.loads(NOTEBOOK.read_text())["cells"])
LINES = "".join(CODE["source"]).rstrip().splitlines()
STORED = "".join(output_of(CODE))


def shown(monkeypatch):
    """What the notebook's code shows, run in this process."""
    monkeypatch.chdir(NOTEBOOK.parent)
    *statements, last_expression = LINES
    names = {}
    exec("\n".join(statements), names)
    # The options of a kernel.
    with pd.option_context("display.max_columns", 20, "display.max_rows", 60, "display.width", 80):
        return repr(eval(last_expression, names))


def test_the_notebook_has_ten_lines():
    assert len([line for line in LINES if line.strip()]) <= 10


def test_the_notebook_shows_the_headline_table():
    assert "no KL" in STORED
    assert "k1_reverse_token in reward" in STORED


def test_the_notebook_shows_what_its_code_gives(monkeypatch):
    monkeypatch.delenv("KL_COMEDY_STORE", raising=False)
    assert shown(monkeypatch) == STORED, "`jupyter execute --inplace examples/results.ipynb` renews what it shows"


def test_the_notebook_reads_a_store(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracking = SimpleNamespace(uri=uri, experiment="trial", tags={})
    for seed, reward in enumerate((0.5, 0.6, 0.7)):
        logger = RunLogger(
            tracking,
            run_dir=tmp_path / str(seed),
            params={"seed": seed, "optimizer.lr": 1e-4, "kl.beta": 0.1},
            tags={"kl.label": "0.1 k3_reverse_token in loss", "sweep": "study_core"},
        )
        logger.log_metrics({"eval/heldout/reward": reward, "eval/heldout/kl/exact_reverse_sequence": 0.25}, 1)
        logger.finish()
    monkeypatch.setenv("KL_COMEDY_STORE", uri)
    table = shown(monkeypatch)
    assert "k3_reverse_token in loss" in table
    # The t interval of three seeds: 0.6 +- 4.303 * 0.1 / sqrt(3).
    assert "0.6 [0.3516, 0.8484]" in table


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("KL_COMEDY_STORE", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    assert output_of(code_of(notebook.cells)) == STORED
