"""A real instruct model with a tied head: log-probs agree before and after an update, in process and as a server."""

from pathlib import Path

import pytest
import torch

from kl_comedy.config.schema import ModelConfig, RolloutConfig
from kl_comedy.errors import RunFailed
from kl_comedy.models import load_model
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts import Sampling, build_vllm, build_vllm_server
from small_policies import largest_gap, perturb

FOLDER = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
TOLERANCE = 5e-4
"""Nats, float32."""

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="models/SmolLM2-135M-Instruct is not there: make smollm2")


@pytest.fixture
def policy():
    return load_model(ModelConfig(source=str(FOLDER)))


def prompts(policy):
    texts = ("<|im_start|>user\n4 + 3 =<|im_end|>\n<|im_start|>assistant\n4 + 3 =", "The capital of France is")
    prompts = []
    for text in texts:
        ids = tuple(policy.tokenizer(text)["input_ids"])
        prompts.append(Prompt(problem=Problem(id=text, text=text, answer=""), text=text, token_ids=ids))
    return prompts


@pytest.mark.parametrize("build", [build_vllm, pytest.param(build_vllm_server, marks=pytest.mark.slow)])
def test_log_probs_agree_before_and_after_an_update(policy, build, tmp_path, monkeypatch):
    config = RolloutConfig(batch_sequences=8, options={"max_model_len": 256, "kv_cache_gib": 0.5})
    backend = build(config, loaded=policy)
    settings = Sampling(temperature=1.0, max_new_tokens=12)

    def gap(seed):
        rollouts = backend.generate(prompts(policy), group_size=3, sampling=settings, seed=seed)
        return largest_gap(policy, rollouts)

    try:
        if build is build_vllm_server:
            backend.work_in(tmp_path)
        before = gap(0)
        perturb(policy.model, size=0.1)
        stale = gap(1)
        backend.update_weights(1)
        after = gap(2)
        print(f"{build.__name__}: gap before {before:.2e}, left behind {stale:.2e}, after the update {after:.2e} nats")
        assert before < TOLERANCE
        assert stale > TOLERANCE, "weights that stay behind would be seen"
        assert after < TOLERANCE
        if build is build_vllm:
            assert_stale_head_is_caught(backend, policy, monkeypatch)
    finally:
        backend.close()


def assert_stale_head_is_caught(backend, policy, monkeypatch):
    """What an update through an ordinary checkpoint of a tied model does: the head's packed copy stays behind."""
    from kl_comedy.rollouts.engines import vllm

    full_weights = vllm.full_weights

    def without_the_head(*arguments):
        return ((name, weight) for name, weight in full_weights(*arguments) if name != "lm_head.weight")

    monkeypatch.setattr(vllm, "full_weights", without_the_head)
    with torch.no_grad():
        policy.causal.get_output_embeddings().weight.mul_(1.05)
    with pytest.raises(RunFailed, match="log-probs of the probe differ"):
        backend.update_weights(2)
