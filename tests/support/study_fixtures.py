"""A small study in a store: two KL families and none, over betas and seeds, one seed of one family collapsed."""

import shutil
import threading

import pytest

from commands import run_here
from kl_comedy.processes import free_port
from kl_comedy.tracking.store import connect
from study_runs import FAMILIES, track


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory):
    """The folder of the store, filled once for all tests: a run takes a second to track."""
    folder = tmp_path_factory.mktemp("study")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    connect(uri)
    for family, betas in FAMILIES.items():
        for beta, (reward, kl) in betas.items():
            for seed in range(3):
                collapsed = (family, beta, seed) == ("k3_reverse_token in loss", 0.05, 2)
                if collapsed:
                    track(folder, uri, family, beta, seed, reward=0.0, kl=40.0)
                else:
                    track(folder, uri, family, beta, seed, reward=reward + seed / 100, kl=kl)
    return folder


@pytest.fixture(scope="session")
def study(study_folder):
    """The uri of the store; for reading."""
    return f"sqlite:///{study_folder / 'mlflow.db'}"


@pytest.fixture
def study_copy(study_folder, tmp_path):
    """The uri of a copy that a test may change."""
    shutil.copy(study_folder / "mlflow.db", tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def kl_comedy():
    """The command line in this process: exit code, stdout, stderr."""
    return run_here


@pytest.fixture
def teacher_url(monkeypatch):
    """Our inference server, in this process, with the teacher of test_teacher."""
    from kl_comedy.config import load_config
    from kl_comedy.models import load_model
    from kl_comedy.rollouts.engines import hf_server
    from teachers import OTHER, TINY

    monkeypatch.setenv("VLLM_API_KEY", "key-of-the-teacher")
    engine = hf_server.Engine(load_model(load_config(TINY, [f"model.options={OTHER}"]).model), batch_sequences=8)
    port = free_port()
    server = hf_server.listen(engine, port=port, key="key-of-the-teacher")
    threading.Thread(target=engine.run, daemon=True).start()
    yield f"http://127.0.0.1:{port}"
    engine.stop()
    server.should_exit = True
