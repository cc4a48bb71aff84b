"""What an MLflow server is asked by an upload, whole: routes, their order, and every field of each request."""

import time
from types import SimpleNamespace

import pytest

from kl_comedy.tracking.logger import RunLogger
from kl_comedy.tracking.provenance import process_tags
from recording_mlflow import RUN_ID, recording_mlflow

PARAMS = {"seed": 3, "name": "x", "kl.0.beta": 0.05}


@pytest.fixture
def server(tmp_path):
    with recording_mlflow(tmp_path / "artifacts") as recorder:
        yield recorder


def by_key(items):
    return {item["key"]: item["value"] for item in items}


def without_times(asked, began_ms):
    """The content of a request; its times, which must lie between the test's begin and now, become ``"now"``."""
    if isinstance(asked, list):
        return [without_times(item, began_ms) for item in asked]
    if not isinstance(asked, dict):
        return asked
    content = {}
    for key, value in asked.items():
        if key in ("timestamp", "start_time", "end_time"):
            assert began_ms <= value <= time.time() * 1000
            content[key] = "now"
        else:
            content[key] = without_times(value, began_ms)
    return content


def test_every_request_of_a_short_run(server, tmp_path):
    began_ms = int(time.time() * 1000)
    config = SimpleNamespace(uri=server.uri, experiment="trial", tags={"team": "a"})
    logger = RunLogger(config, run_dir=tmp_path / "run", params=PARAMS, tags={"kl.label": "k3 loss"})
    logger.log_metrics({"train/reward": 0.25, "eval/x/pass@4": 0.5}, 1)
    logger.log_metrics({"train/reward": 0.75}, 2)
    logger.finish()
    asked = [(route, without_times(content, began_ms)) for route, content in server.requests]
    changes = [(route, content) for route, content in asked if not route.endswith(("search", "get", "get-by-name"))]
    tag, created, params, tags, running, metrics, finished = changes

    kind = {"experiment_id": "7", "key": "mlflow.experimentKind", "value": "custom_model_development"}
    assert tag == ("experiments/set-experiment-tag", kind)
    given = {"team": "a", "run_folder": "run", "kl.label": "k3 loss", **process_tags()}
    route, content = created
    stored_tags = by_key(content.pop("tags"))
    assert route == "runs/create"
    assert content == {"experiment_id": "7", "run_name": "x s3", "start_time": "now"}
    added = {"mlflow.source.name", "mlflow.source.type", "mlflow.user", "spool.id"}
    assert stored_tags.keys() == given.keys() | added
    assert given.items() <= stored_tags.items()

    batch = "runs/log-batch"
    texts = [{"key": "seed", "value": "3"}, {"key": "name", "value": "x"}, {"key": "kl.0.beta", "value": "0.05"}]
    assert params == (batch, {"run_id": RUN_ID, "params": texts})
    assert tags[0] == batch
    assert tags[1].keys() == {"run_id", "tags"}
    assert by_key(tags[1]["tags"]) == stored_tags
    assert running == ("runs/update", {"run_id": RUN_ID, "status": "RUNNING"})
    points = [
        {"key": "train/reward", "value": 0.25, "timestamp": "now", "step": 1},
        {"key": "eval/x/pass_at_4", "value": 0.5, "timestamp": "now", "step": 1},
        {"key": "train/reward", "value": 0.75, "timestamp": "now", "step": 2},
    ]
    assert metrics == (batch, {"run_id": RUN_ID, "metrics": points})
    assert finished == ("runs/update", {"run_id": RUN_ID, "status": "FINISHED", "end_time": "now"})

    # Questions decide which run is filled, and which are marked as dead.
    spool_id = stored_tags["spool.id"]
    host = stored_tags["process.host"]
    searches = [content for route, content in asked if route == "runs/search"]
    where = {"experiment_ids": ["7"], "run_view_type": "ACTIVE_ONLY"}
    dead = f"attributes.status = 'RUNNING' AND tags.`process.host` = '{host}'"
    assert searches == [
        {**where, "filter": f"tags.`spool.id` = '{spool_id}'", "max_results": 1},
        {**where, "filter": dead, "max_results": 1000},
    ]
