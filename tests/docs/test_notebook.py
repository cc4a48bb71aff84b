"""The notebook reaches the headline table in ten lines: on the export in results/, and on any store."""

import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from kl_comedy.tracking.logger import RunLogger

NOTEBOOK = Path(__file__).parents[2] / "examples" / "results.ipynb"
(CODE,) = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
(OUTPUT,) = [output for output in CODE["outputs"] if output["output_type"] == "execute_result"]
STORED = "".join(OUTPUT["data"]["text/plain"])


def shown(monkeypatch):
    """What the notebook's code shows, run in this process."""
    monkeypatch.chdir(NOTEBOOK.parent)
    *lines, last = "".join(CODE["source"]).rstrip().splitlines()
    names = {}
    exec("\n".join(lines), names)
    with pd.option_context("display.max_columns", 20, "display.max_rows", 60, "display.width", 80):  # a kernel's
        return repr(eval(last, names))


def test_the_notebook_shows_what_its_code_gives(monkeypatch):
    monkeypatch.delenv("KL_COMEDY_STORE", raising=False)
    assert len([line for line in "".join(CODE["source"]).splitlines() if line.strip()]) <= 10
    assert "no KL" in STORED and "k1_reverse_token in reward" in STORED
    assert shown(monkeypatch) == STORED, "`jupyter execute --inplace examples/results.ipynb` renews what it shows"


def test_the_notebook_reads_a_store(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for seed, reward in enumerate((0.5, 0.6, 0.7)):
        logger = RunLogger(
            SimpleNamespace(uri=uri, experiment="trial", flush_every=10, tags={}),
            run_dir=tmp_path / str(seed),
            params={"seed": seed, "optimizer.lr": 1e-4, "kl.beta": 0.1},
            tags={"kl.label": "0.1 k3_reverse_token in loss", "sweep": "study_core"},
        )
        logger.log_metrics({"eval/heldout/reward": reward, "eval/heldout/kl/exact_reverse_sequence": 0.25}, 1)
        logger.finish()
    monkeypatch.setenv("KL_COMEDY_STORE", uri)
    table = shown(monkeypatch)
    assert "k3_reverse_token in loss" in table and "0.6 [0.3516, 0.8484]" in table


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("KL_COMEDY_STORE", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    (code,) = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (output,) = [output for output in code.outputs if output["output_type"] == "execute_result"]
    assert output["data"]["text/plain"] == STORED
