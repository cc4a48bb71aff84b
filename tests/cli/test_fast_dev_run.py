"""``kl-comedy train --fast-dev-run``: one update and one small evaluation, of which nothing stays."""

import tempfile
from pathlib import Path

from commands import run_here

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"


def test_a_fast_dev_run_trains_evaluates_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    settings = ["tracking.uri=sqlite:///store.db", "optimizer.warmup_steps=5", "train.record_rollouts=jsonl"]
    code, _, err = run_here("train", TINY, *settings, "--fast-dev-run", cwd=tmp_path)
    assert code == 0, err
    assert "training for 1 updates" in err
    assert "heldout reward" in err
    assert "fast dev run: one update and one evaluation of a few problems in" in err
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_mistake_that_shows_in_the_update_is_found(tmp_path):
    too_large = ["optimizer.lr=1e30", "optimizer.clip_norm=null"]
    code, _, err = run_here("train", TINY, *too_large, "--fast-dev-run", cwd=tmp_path)
    assert code == 1
    assert "finite" in err


def test_the_rules_of_configs_hold(tmp_path):
    code, _, err = run_here("train", TINY, "optimizer.lr=-1", "--fast-dev-run", cwd=tmp_path)
    assert code == 2
    assert "optimizer.lr: got -1" in err
    assert list(tmp_path.iterdir()) == []
