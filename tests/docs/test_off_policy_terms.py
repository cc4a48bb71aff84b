"""What docs/off_policy_terms.md and docs/references.md say of samples some updates old, against their commands."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "off_policy_terms.md"


def cell(row, name):
    least, median, largest = (float(row[f"range_{name}_{part}"]) for part in ("least", "median", "largest"))
    return f"{median:.2g} [{least:.2g}, {largest:.2g}]"


@pytest.mark.slow
def test_the_page_has_the_figures_of_its_command(kl_comedy):
    table = PAGE.read_text().partition("<!-- ages -->\n")[2].partition("\n\n")[0].splitlines()[2:]
    written = [[text.strip() for text in row.strip("|").split("|")] for row in table]
    names = [cells[0].strip("`") for cells in written]
    code, out, err = kl_comedy("certify", *names, "--regime", "off_policy", "--range", "--format", "csv")
    assert code == 0, err
    rows = {(row["name"], row["range_age"]): row for row in csv.DictReader(io.StringIO(out))}
    for name, cells in zip(names, written, strict=True):
        strengths = [cell(rows[name, age], "strength") for age in ("1", "4", "10")]
        assert cells[1:] == [*strengths, cell(rows[name, "10"], "error")]


@pytest.mark.slow
def test_the_page_has_the_table_of_moving_averages(tmp_path):
    script = ROOT / "research" / "scripts" / "sampler_average.py"
    command = [sys.executable, script, "--out", tmp_path / "figure.svg"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed in (ROOT / "docs" / "references.md").read_text()
