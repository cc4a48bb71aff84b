"""What an export leaves out, and that it reads back as the frame it was."""

import math

import pandas as pd
import pytest

from kl_comedy.errors import UserError
from kl_comedy.tracking.runs import drop_columns, read_runs

FRAME = pd.DataFrame(
    {
        "run_id": ["a1", "02"],
        "status": ["FINISHED", "RUNNING"],
        "params.seed": ["0", "1"],
        "params.optimizer.lr": ["0.0001", "1e-05"],
        "params.output": ["/somewhere", "/else"],
        "params.lora": ["null", None],
        "tags.run.dir": ["x", "y"],
        "tags.kl.label": ["no KL", "0.10 k3_reverse_token in loss"],
        "metrics.train/reward": [0.1 + 0.2, math.nan],
        "metrics.kl/x": [math.inf, 1e-300],
        "duration_s": [1.5, math.nan],
    }
)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_export_reads_back_as_it_was(tmp_path, suffix):
    file = tmp_path / f"runs.{suffix}"
    FRAME.to_csv(file, index=False) if suffix == "csv" else FRAME.to_parquet(file, index=False)
    found = read_runs(file)
    pd.testing.assert_frame_equal(found, FRAME, check_exact=True, check_dtype=False)
    assert found["params.optimizer.lr"].tolist() == ["0.0001", "1e-05"], "texts stay texts"


def test_columns_are_left_out_by_name_or_pattern():
    kept = list(drop_columns(FRAME, ["run.*", "output", "metrics.kl/*"]).columns)
    assert kept == [name for name in FRAME if name not in ("tags.run.dir", "params.output", "metrics.kl/x")]
    assert list(drop_columns(FRAME, []).columns) == list(FRAME.columns)


@pytest.mark.parametrize(("pattern", "said"), [("outputs", "did you mean 'output'"), ("run_*", "run_id stays")])
def test_a_pattern_for_nothing_or_for_the_run_says_so(pattern, said):
    with pytest.raises(UserError, match=said):
        drop_columns(FRAME, [pattern])


def test_what_is_no_export_says_so(tmp_path):
    (tmp_path / "a.csv").write_text("name,mean\nx,1\n")
    (tmp_path / "a.parquet").write_text("no")
    for name, said in (("a.csv", "lacks run_id"), ("a.parquet", "cannot be read"), ("b.csv", "no such export")):
        with pytest.raises(UserError, match=said):
            read_runs(tmp_path / name)
    with pytest.raises(UserError):
        read_runs(f"sqlite:///{tmp_path}/absent.db")
