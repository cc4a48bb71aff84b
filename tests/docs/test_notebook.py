"""The notebook reaches the headline table in ten lines, on a store made here, in a kernel of its own."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kl_comedy.tracking import Tracker

NOTEBOOK = Path(__file__).parents[2] / "examples" / "results.ipynb"
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")


def test_the_notebook_tabulates_a_store_in_ten_lines(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for seed, reward in enumerate((0.5, 0.6, 0.7)):
        tracker = Tracker.start(
            SimpleNamespace(uri=uri, experiment="trial", flush_every=10, tags={}), run_dir=tmp_path / str(seed),
            run_name="r", params={"seed": seed, "optimizer.lr": 1e-4, "kl.beta": 0.1},
            tags={"kl.label": "0.1 k3_reverse_token in loss"},
        )  # fmt: skip
        tracker.log({"eval/heldout/reward": reward, "train/reward": 0.25}, 1)
        tracker.finish()
    monkeypatch.setenv("KL_COMEDY_STORE", uri)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (code,) = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len([line for line in code.source.splitlines() if line.strip()]) <= 10
    assert [output["output_type"] for output in code.outputs] == ["execute_result"], "the notebook is kept executed"
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = code.outputs[-1]["data"]["text/plain"]
    assert "k3_reverse_token in loss" in shown and "0.6 [0.3516, 0.8484]" in shown
