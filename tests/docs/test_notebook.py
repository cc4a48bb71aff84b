"""The notebook runs from top to bottom on a CPU: certify, explain, the headline table, two runs, table and curves."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from kl_comedy.tracking.logger import RunLogger

NOTEBOOK = Path(__file__).parents[2] / "examples" / "results.ipynb"
CODE_CELLS = ["certify", "explain", "headline-table", "train", "results-table", "curves"]


def code_of(cells):
    """The cells with code, by their id."""
    return {cell["id"]: cell for cell in cells if cell["cell_type"] == "code"}


def output_of(cell):
    """What the value of the cell's last line was shown as."""
    (output,) = [output for output in cell["outputs"] if output["output_type"] == "execute_result"]
    return output["data"]["text/plain"]


def printed_by(cell):
    """What the cell printed on stdout."""
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


CODE = code_of(json.loads(NOTEBOOK.read_text())["cells"])
HEADLINE = CODE["headline-table"]
LINES = "".join(HEADLINE["source"]).rstrip().splitlines()
STORED = "".join(output_of(HEADLINE))


def shown(monkeypatch):
    """What the code of the headline table shows, run in this process."""
    monkeypatch.chdir(NOTEBOOK.parent)
    *statements, last_expression = LINES
    names = {}
    exec("\n".join(statements), names)
    # The options of a kernel.
    with pd.option_context("display.max_columns", 20, "display.max_rows", 60, "display.width", 80):
        return repr(eval(last_expression, names))


def test_the_headline_table_takes_ten_lines():
    assert len([line for line in LINES if line.strip()]) <= 10


def test_the_notebook_shows_the_headline_table():
    assert "no KL" in STORED
    assert "k1_reverse_token in reward" in STORED


def test_the_notebook_shows_what_its_code_gives(monkeypatch):
    monkeypatch.delenv("KL_COMEDY_STORE", raising=False)
    assert shown(monkeypatch) == STORED, "`jupyter execute --inplace examples/results.ipynb` renews what it shows"


@pytest.mark.parametrize("name", ["certify", "explain"])
def test_the_notebook_shows_what_these_print(name, capsys):
    exec("".join(CODE[name]["source"]), {})
    assert capsys.readouterr().out == printed_by(CODE[name])


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


def check_results(cells):
    """What the cells show, whichever machine they ran on: the runs' numbers are those of one machine."""
    assert list(cells) == CODE_CELLS
    for name in ("train", "results-table"):
        # One text in a kernel's answer, its lines in a file.
        shown_rows = "".join(output_of(cells[name]))
        assert "no KL" in shown_rows, name
        assert "k1_reverse_token in reward" in shown_rows, name
    (picture,) = [output["data"]["image/png"] for output in cells["curves"]["outputs"] if "data" in output]
    assert base64.b64decode(picture).startswith(b"\x89PNG")


def test_the_notebook_is_stored_with_what_it_shows():
    check_results(CODE)
    for name, cell in CODE.items():
        # Warnings and progress of other packages, with the paths of the machine that renewed the notebook.
        assert not [output for output in cell["outputs"] if output.get("name") == "stderr"], name


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel_from_top_to_bottom(monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("KL_COMEDY_STORE", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # What a cell shows must come from this execution.
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    cells = code_of(notebook.cells)
    check_results(cells)
    assert output_of(cells["headline-table"]) == STORED
    for name in ("certify", "explain"):
        assert printed_by(cells[name]) == printed_by(CODE[name])
