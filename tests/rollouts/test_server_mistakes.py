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
        (line,) = [line for line in errors.splitlines() if line.startswith(("error", "failed", "Traceback"))]
        assert code == 2 and line.startswith("error: rollout.options.urls: got 'http://127.0.0.1:"), errors
        return line

    return run


def test_a_server_that_a_run_cannot_use_is_one_line_and_leaves_nothing(train, serve, tmp_path):
    small = llama(tied=True)
    small.resize_token_embeddings(8)
    for url, message in (
        (f"http://127.0.0.1:{free_port()}", "allowed: a running transformers server"),
        (serve(key="another").url, "refuses the API key in the environment variable VLLM_API_KEY"),
        (serve().url, "the model that is trained (log-probs of the probe differ"),
        (serve(loaded(small)).url, "the model that is trained (it refuses the probe's tokens"),
    ):
        assert message in train(url)
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("lag", [[], ["lag.mode=async", "lag.max_steps=1"]])
def test_a_run_whose_weights_another_run_replaced_ends_and_says_so(train, serve, tmp_path, lag):
    server = serve(load_model(load_config(TINY).model))
    generate, batches = server.engine.generate, []

    def replaced(groups):
        batches.append(groups)
        if len(batches) == 3:
            server.engine.set_label("kl_comedy/another/1")
        return generate(groups)

    server.engine.generate = replaced
    line = train(server.url, "eval.at_start=false", *lag)
    assert "(label 'kl_comedy/another/1'): another run updates it; give each run its own servers" in line
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "FAILED" and "another run updates it" in summary["reason"]
    assert not list(run.glob("sampler/*")), "the weights written for the server are removed"
