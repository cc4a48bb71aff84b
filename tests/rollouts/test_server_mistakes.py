"""Servers named by address that a run cannot use: one line, exit code 2, nothing left behind."""

import json
from pathlib import Path

import pytest

from commands import run_here
from engine_policies import llama, loaded
from kl_comedy.config import load_config
from kl_comedy.models import load_model
from kl_comedy.processes import free_port

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"


@pytest.fixture
def train(tmp_path, short_polls):
    """``kl-comedy train`` with a server, in this process: its error, with which it exits 2."""

    def run(url, *overrides):
        options = f"rollout.options={{urls: ['{url}'], start_timeout_s: 2, request_timeout_s: 5}}"
        words = ["train", TINY, "rollout.backend=hf_server", options, f"output={tmp_path / 'runs'}", *overrides]
        code, _, errors = run_here(*words)
        endings = [line for line in errors.splitlines() if line.startswith(("error", "failed", "Traceback"))]
        assert len(endings) == 1, errors
        assert endings[0].startswith("error: rollout.options.urls: got 'http://127.0.0.1:"), errors
        assert code == 2, errors
        return endings[0]

    return run


def test_an_address_where_nothing_listens_is_one_line_and_leaves_nothing(train, tmp_path):
    line = train(f"http://127.0.0.1:{free_port()}")
    assert "allowed: a running transformers server" in line
    assert not (tmp_path / "runs").exists()


def test_a_server_that_refuses_the_key_is_one_line_and_leaves_nothing(train, serve, tmp_path):
    line = train(serve(key="another-key-than-theirs").url)
    assert "refuses the API key in the environment variable VLLM_API_KEY" in line
    assert not (tmp_path / "runs").exists()


def test_a_server_of_another_model_is_one_line_and_leaves_nothing(train, serve, tmp_path):
    line = train(serve().url)
    assert "the model that is trained (log-probs of the probe differ" in line
    assert not (tmp_path / "runs").exists()


def test_a_server_of_a_smaller_vocabulary_is_one_line_and_leaves_nothing(train, serve, tmp_path):
    small = llama(tied=True)
    small.resize_token_embeddings(8)
    line = train(serve(loaded(small)).url)
    assert "the model that is trained (it refuses the probe's tokens" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("lag", [[], ["lag.mode=async", "lag.max_steps=1"]], ids=["on-policy", "async"])
def test_a_run_whose_weights_another_run_replaced_ends_and_says_so(train, serve, tmp_path, lag):
    server = serve(load_model(load_config(TINY).model))
    generate = server.engine.generate
    requests = []

    def replaced_before_the_third_request(groups):
        requests.append(groups)
        if len(requests) == 3:
            server.engine.set_label("kl_comedy/another/1")
        return generate(groups)

    server.engine.generate = replaced_before_the_third_request
    line = train(server.url, "eval.at_start=false", *lag)
    assert "(label 'kl_comedy/another/1'): another run updates it; give each run its own servers" in line
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "FAILED"
    assert "another run updates it" in summary["reason"]
    assert not list(run.glob("sampler/*")), "the weights written for the server are removed"
