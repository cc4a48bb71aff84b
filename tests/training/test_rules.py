"""Each rule of kl_comedy.training.rules, by its name: settings that break it, and no rule before it."""

import pytest

from kl_comedy.config import load_config
from kl_comedy.errors import UserError, first_refusal
from kl_comedy.kl import resolve_terms
from kl_comedy.training.build import check_training
from kl_comedy.training.rules import RULES, TrainingSettings
from training_runs import TINY

TEACHER = ["reference.teacher.source=pocket", "kl=opd/sampled"]
SERVED = [*TEACHER, "reference.teacher.url=http://localhost:1"]
TOP_P = "rollout.truncation={top_p: 0.9}"
EXACT_TO_SAMPLER = "kl=[{estimator: exact, placement: loss, reference: sampler}]"
DPO = ["algorithm.dpo={beta: 0.5}", "kl=[]"]
BROKEN = {
    "trained_weights_in_16_bit": ["model.dtype=bfloat16"],
    "value_settings_without_critic": ["algorithm.value.lam=0.5"],
    "max_kl_without_periodic_term": ["reference.max_kl=0.1"],
    "periodic_reference_that_never_moves": ["reference.period=null"],
    "term_without_teacher": ["kl=opd/sampled"],
    "teacher_without_term": ["reference.teacher.source=pocket"],
    "loading_options_of_a_served_teacher": [*SERVED, "reference.teacher.dtype=bfloat16"],
    "server_options_of_a_loaded_teacher": [*TEACHER, "reference.teacher.server_model=small"],
    "temperature_of_a_served_teacher": [*SERVED, "rollout.temperature=0.7"],
    "term_needs_more_than_a_server_gives": [*SERVED, "kl=opd/reverse"],
    "adapter_of_a_sharded_teacher": [
        *TEACHER,
        "reference.teacher.adapter=folder",
        "train.strategy=fsdp",
        "train.devices=2",
    ],
    "old_policy_that_is_the_policy": ["kl.0.reference=old"],
    "past_policy_of_another_engine": ["rollout.backend=hf_server", EXACT_TO_SAMPLER],
    "past_policy_of_truncated_samples": [TOP_P, EXACT_TO_SAMPLER],
    "past_policies_in_shards": ["train.strategy=fsdp", "train.devices=2", EXACT_TO_SAMPLER],
    "own_baseline_without_group": [
        "rollout.group_size=1",
        "algorithm.advantage=batch_mean",
        "kl=[{estimator: k1, placement: reward, baseline: own}]",
    ],
    "score_centring_without_top_logps": [
        "rollout.backend=hf_server",
        "kl=[{estimator: k1, placement: reward, score_centring: 16}]",
    ],
    "own_credit_before_gae": [
        "algorithm.advantage=gae",
        "kl=[{estimator: k1, placement: reward, credit: own, baseline: before}]",
    ],
    "truncation_without_kept_sets": ["rollout.backend=vllm", TOP_P],
    "term_of_what_truncation_leaves_out": [TOP_P, "kl=[{estimator: exact_forward, placement: loss}]"],
    "setting_that_does_not_know_kept_sets": [TOP_P, "train.record_rollouts=jsonl"],
    "setting_unused_by_dpo": [*DPO, "algorithm.reward_weight=2"],
    "ess_scaling_of_dpo": [*DPO, "optimizer.ess_scaling=sqrt"],
    "terms_beside_dpo": [*DPO, "kl=[{estimator: k1}]"],
}


def settings(overrides):
    config = load_config(TINY, overrides)
    return TrainingSettings(config=config, terms=resolve_terms(config.kl))


def test_the_table_and_this_file_have_the_same_rules():
    assert [rule.__name__ for rule in RULES] == list(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_is_broken_by_its_settings_and_refuses_the_run(name):
    refusals = {rule.__name__: rule(settings(BROKEN[name])) for rule in RULES}
    broken = [rule for rule, error in refusals.items() if error is not None]
    assert broken[:1] == [name]
    with pytest.raises(UserError) as refused:
        check_training(load_config(TINY, BROKEN[name]))
    assert str(refused.value) == str(refusals[name])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["kl=[{estimator: top_k, placement: loss}]"], "kl.0.estimator"),
        (["kl=[{estimator: k1, weight: policy}]"], "kl.0.weight"),
        (["kl=[{estimator: k1, score_centring: 4}]"], "kl.0.score_centring"),
        (["kl=[{estimator: k1, beta: {target: 0.1}}]"], "kl.0.beta"),
        (DPO, "algorithm.dpo"),
        (
            ["algorithm.advantage=gae", "algorithm.value.bootstrap_truncated=true"],
            "algorithm.value.bootstrap_truncated",
        ),
        (["kl=[{estimator: k1, reference: periodic}]", "reference.max_kl=0.1"], "reference.max_kl"),
        (["audit.every=2"], "audit.every"),
    ],
)
def test_what_would_be_wrong_with_truncated_sampling_is_refused_by_its_key(overrides, key):
    assert first_refusal(RULES, settings(overrides)) is None
    refusal = str(first_refusal(RULES, settings([TOP_P, *overrides])))
    assert refusal.startswith(f"{key}: ")
    assert "rollout.truncation" in refusal


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k_lambda", "exact"])
def test_terms_that_are_proved_of_a_renormalized_policy_train_with_truncated_sampling(estimator):
    assert first_refusal(RULES, settings([TOP_P, f"kl=[{{estimator: {estimator}, placement: loss}}]"])) is None


@pytest.mark.parametrize("overrides", [[], TEACHER, SERVED, DPO, ["algorithm.advantage=gae"], ["model.lora={rank: 2}"]])
def test_settings_that_can_train_break_no_rule(overrides):
    assert first_refusal(RULES, settings(overrides)) is None
