"""Twenty cells that log into one store at the same time lose nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kl_comedy.slurm.manifest import Manifest
from kl_comedy.slurm.submit import create_stores

WRITERS, STEPS, METRICS = 20, 40, 5
WRITER = """
import sys
from types import SimpleNamespace
from kl_comedy.tracking.logger import RunLogger
uri, folder, name, steps, metrics = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
config = SimpleNamespace(uri=uri, experiment="many", flush_every=5, tags={"sweep": "many"})
logger = RunLogger.start(config, run_dir=folder, run_name=name, params={"seed": name}, tags={})
for step in range(1, steps + 1):
    logger.log_metrics({f"train/m{n}": float(step * n) for n in range(metrics)}, step)
    if step % 5 == 0:
        logger.commit(step)
logger.finish()
"""


@pytest.mark.slow
def test_twenty_writers_one_store_no_metric_lost(tmp_path):
    uri = f"sqlite:///{tmp_path}/store.db"
    planned = Manifest(
        name="many",
        directory=str(tmp_path),
        base="",
        base_sha256="",
        plugins=(),
        evaluate=None,
        max_parallel=None,
        stores=((uri, "many"), ("none", "many")),
        package_version="",
        cells=(),
    )
    create_stores(planned)
    create_stores(planned)  # a second time changes nothing
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, uri, str(tmp_path / str(n)), str(n), str(STEPS), str(METRICS)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(WRITERS)
    ]
    said = [child.communicate(timeout=550)[1] for child in children]
    assert [child.returncode for child in children] == [0] * WRITERS, said
    assert said == [""] * WRITERS
    from kl_comedy.tracking.runs import runs_frame
    from kl_comedy.tracking.store import connect

    frame = runs_frame(uri, "many")
    assert sorted(frame["params.seed"], key=int) == [str(n) for n in range(WRITERS)]
    client = connect(uri)
    for run_id in frame["run_id"]:
        for n in range(METRICS):
            points = [(point.step, point.value) for point in client.get_metric_history(run_id, f"train/m{n}")]
            assert points == [(step, float(step * n)) for step in range(1, STEPS + 1)]
    assert all(json.loads((tmp_path / str(n) / "tracking.json").read_text()) for n in range(WRITERS))


def test_a_store_that_cannot_be_made_is_one_error(tmp_path):
    from dataclasses import replace

    from kl_comedy.errors import RunFailed

    Path(tmp_path / "file").write_text("")
    planned = Manifest(
        name="many",
        directory=str(tmp_path),
        base="",
        base_sha256="",
        plugins=(),
        evaluate=None,
        max_parallel=None,
        stores=((f"sqlite:///{tmp_path}/file/store.db", "many"),),
        package_version="",
        cells=(),
    )
    with pytest.raises(RunFailed, match="the results store cannot be created"):
        create_stores(planned)
    create_stores(replace(planned, stores=()))
