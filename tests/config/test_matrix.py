"""Allowed cells of the matrix (docs/matrix.md) for two updates: two processes train what one trains."""

import functools
import itertools
import sys

import pytest

import memory_engines
from dialogues import DIALOGUES
from rank_runs import COMMON, MIXED, assert_same, over
from teachers import TEACHER
from training_runs import ROOT, go, metrics_of

sys.path.insert(0, str(ROOT / "research" / "scripts"))
from doc_tables import matrix

assert memory_engines, "the backend of tests that is registered by its import"

TWO = ["train.steps=2", "train.checkpoint_every=0", "train.eval_every=2", "optimizer.lr=1.0e-3"]
ALGORITHMS = {
    "full": [],
    "lora": ["model.lora={rank: 4}"],
    "value head": [
        "algorithm.advantage=gae",
        "algorithm.policy_loss=ppo_clip",
        "algorithm.proximal=recomputed",
        "algorithm.updates_per_batch=2",
        "algorithm.value={clip: 0.2, trunk: true, bootstrap_truncated: true, lr: 0.05}",
        "kl.0.baseline=before",
        "train.steps=4",
    ],
    "exact KL, adaptive beta": ["kl=[{estimator: exact, placement: loss, beta: {target: 0.5}}]", "train.steps=3"],
    "audit": [*MIXED, "audit.every=1", "audit.terms=[own,grpo]", "model.gradient_checkpointing=true"],
    "audit of an adapter": ["audit.every=1", "model.lora={rank: 4}", "train.precision=bf16"],
    "dialogues": DIALOGUES,
    "DPO": ["algorithm.dpo={}", "kl=[]"],
    "exact KL to a teacher": [*TEACHER, "kl=opd/reverse"],
    "k1 to a teacher in reward": [*TEACHER, "kl=opd/sampled"],
}
SAMPLERS = {
    "hf, replayed": ["lag.mode=replayed", "lag.steps=1"],
    "hf_server": ["rollout.backend=hf_server"],
    "hf_server, gloo": ["rollout.backend=hf_server", "rollout.options={transport: gloo}"],
    "async, wait": ["lag.mode=async"],
    "LoRA, async, wait": ["lag.mode=async", "model.lora={rank: 4}"],
    "value head, async in memory": [*ALGORITHMS["value head"], "lag.mode=async", "rollout.backend=memory"],
    "dialogues, two servers": [*DIALOGUES, "rollout.backend=hf_server", "rollout.options={servers: 2}"],
    "dialogues, async in memory": [*DIALOGUES, "lag.mode=async", "rollout.backend=memory"],
    "two servers, bf16": ["rollout.backend=hf_server", "rollout.options={servers: 2}", "train.precision=bf16"],
}
"""Samples are equal in one process and in two. "full" is ``hf`` on-policy."""
FREE = {
    "async, drop": ["lag.mode=async", "lag.max_steps=2", "lag.policy=drop"],
    "async, in flight": ["lag.mode=async", "lag.max_steps=2", "lag.in_flight=true"],
}
"""Samples depend on who is faster."""
WITH_DDP = ("full", "value head")
SAMPLERS_WITH_DDP = ("hf_server, gloo", "value head, async in memory", "dialogues, async in memory")
"""What trains with ``ddp`` too. The others have nothing that depends on the strategy but the reading of shards, which
is tested with ``fsdp``; tests/twin draws configs for both."""
NOT_WITH_FSDP = ("value head, async in memory", "dialogues, async in memory")
"""The engines of the test copy a whole policy."""


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The run of one process, once for each setting."""

    @functools.cache
    def run(settings):
        return go(tmp_path_factory.mktemp("single"), *COMMON, *TWO, *settings).run

    return run


def check(tmp_path, single, strategy, settings):
    run = over(tmp_path / strategy, strategy, *TWO, *settings)
    assert_same(run, single(tuple(settings)), atol=2e-5)
    return run


def cells(names, with_ddp):
    """Strategy and name."""
    return [("ddp", name) for name in with_ddp] + [("fsdp", name) for name in names if name not in NOT_WITH_FSDP]


def audit_metrics(run):
    return {key: value for key, value in metrics_of(run).items() if key[1].startswith("audit/")}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "algorithm"), cells(ALGORITHMS, WITH_DDP))
def test_algorithms(tmp_path, single, strategy, algorithm):
    settings = ALGORITHMS[algorithm]
    run = check(tmp_path, single, strategy, settings)
    audited = audit_metrics(run)
    assert audited == pytest.approx(audit_metrics(single(tuple(settings))), rel=1e-5, abs=1e-6)
    assert bool(audited) == algorithm.startswith("audit")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "sampler"), cells(SAMPLERS, SAMPLERS_WITH_DDP))
def test_samplers(tmp_path, single, strategy, sampler):
    run = check(tmp_path, single, strategy, SAMPLERS[sampler])
    if not sampler.startswith("hf"):
        assert not list(run.path.glob("sampler/weights-*")), "weights of engines are removed"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "judged"), [("ddp", "again"), ("fsdp", "recorded")])
def test_replay(tmp_path, single, strategy, judged):
    """Rank 0 reads a recording of one process; evaluation samples on all ranks."""
    recorded = single(("train.record_rollouts=jsonl",))
    options = f"rollout.options={{path: {recorded.path / 'rollouts'}, rewards: {judged}}}"
    check(tmp_path, single, strategy, ["rollout.backend=replay", options])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "sampler"), [("ddp", "async, in flight"), ("fsdp", "async, drop")])
def test_the_age_of_samples_is_bounded_over_processes(tmp_path, strategy, sampler):
    run = over(tmp_path, strategy, *TWO, *FREE[sampler], "train.steps=6")
    ages = {step: value for (step, name), value in metrics_of(run).items() if name == "policy/staleness_max"}
    assert len(ages) == 6
    assert max(ages.values()) <= 2


@pytest.mark.slow
def test_no_combination_is_refused_for_a_reason_of_its_own():
    """An algorithm works with every sampler and lag that work."""
    config_error = functools.cache(matrix.config_error)
    backends = ("hf", "vllm", "vllm_server", "hf_server", "replay")
    cells = itertools.product(matrix.STRATEGIES, backends, matrix.LAGS.values(), matrix.ALGORITHMS.values())
    for strategy, name, lag, algorithm in cells:
        sampler = (f"rollout.backend={name}", *lag)
        expected = {config_error(strategy, *sampler), config_error(strategy, *algorithm)} - {None}
        reason = config_error(strategy, *sampler, *algorithm)
        if expected:
            assert reason in expected, (strategy, sampler, algorithm)
        else:
            assert reason is None, (strategy, sampler, algorithm)
