"""The notebook reaches the headline table in ten lines: on the export kept with the results, and on any store."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kl_comedy.tracking.logger import RunLogger

NOTEBOOK = Path(__file__).parents[2] / "examples" / "results.ipynb"
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")


def executed(notebook):
    """What its one cell of code shows, as text, in a kernel of its own."""
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    return shown(notebook)


def shown(notebook):
    (code,) = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (output,) = [output for output in code.outputs if output["output_type"] == "execute_result"]
    return output["data"]["text/plain"]


def test_the_notebook_is_kept_as_it_runs(monkeypatch):
    monkeypatch.delenv("KL_COMEDY_STORE", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (code,) = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len([line for line in code.source.splitlines() if line.strip()]) <= 10
    kept = shown(notebook)
    assert "no KL" in kept and "k1_reverse_token in reward" in kept
    assert executed(notebook) == kept, "`jupyter execute --inplace examples/results.ipynb` renews what it shows"


def test_the_notebook_reads_a_store(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for seed, reward in enumerate((0.5, 0.6, 0.7)):
        logger = RunLogger.start(
            SimpleNamespace(uri=uri, experiment="trial", flush_every=10, tags={}),
            run_dir=tmp_path / str(seed),
            run_name="r",
            params={"seed": seed, "optimizer.lr": 1e-4, "kl.beta": 0.1},
            tags={"kl.label": "0.1 k3_reverse_token in loss", "sweep": "study_core"},
        )
        logger.log_metrics({"eval/heldout/reward": reward, "eval/heldout/kl/exact_reverse_sequence": 0.25}, 1)
        logger.finish()
    monkeypatch.setenv("KL_COMEDY_STORE", uri)
    found = executed(nbformat.read(NOTEBOOK, as_version=4))
    assert "k3_reverse_token in loss" in found and "0.6 [0.3516, 0.8484]" in found
