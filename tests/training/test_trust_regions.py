"""Trust regions in training: masks of tokens and completions, the step by effective sample size, triggered resets."""

import math

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.kl import BetaTarget
from kl_comedy.training.build import check_training
from kl_comedy.training.metrics import measured_kl
from training_runs import SHORT, TINY, go, metrics_of, weights_of

TIGHT = {
    "dppo_tv": "threshold: 1.0e-6",
    "dppo_kl": "threshold: 1.0e-6",
    "cppo": "threshold: 1.0e-6",
    "trm": "threshold: 1.0e-6",
    "prefix_budget": "budget: 1.0e-6",
}
"""Every mask, with a bound that the smallest step exceeds."""
MASKS = tuple(TIGHT)
STALE = ["lag.mode=replayed", "lag.steps=1", "train.steps=3", "optimizer.lr=1.0e-2"]


def correction(options):
    """The override for corrections, by name with the text of their options."""
    corrections = ", ".join(f"{name}: {{{text}}}" for name, text in options.items())
    return f"algorithm.correction={{{corrections}}}"


def test_on_policy_no_mask_drops_a_token(tmp_path):
    masked = go(tmp_path / "masked", *SHORT, correction(dict.fromkeys(MASKS, ""))).run
    plain = go(tmp_path / "plain", *SHORT).run
    assert weights_of(masked) == weights_of(plain), "two updates, bit for bit"
    shares = {key: value for key, value in metrics_of(masked).items() if key[1].endswith("masked_share")}
    assert {name for _, name in shares} == {f"policy/correction/{mask}/masked_share" for mask in MASKS}
    for key, share in shares.items():
        assert share == 0, key


def test_on_stale_samples_each_mask_drops_tokens_and_the_rest_trains(tmp_path):
    signal = "kl.0.baseline=before"  # advantages that differ, whatever the rewards are
    logged = metrics_of(go(tmp_path, *SHORT, *STALE, signal, correction(TIGHT)).run)
    for name in MASKS:
        assert 0 < logged[3, f"policy/correction/{name}/masked_share"] <= 1, name
    assert logged[3, "policy/ess"] < 1
    assert math.isfinite(logged[3, "grad/norm"])
    one_sided = logged[3, "policy/correction/dppo_tv/masked_share"]
    two_sided = logged[3, "policy/correction/trm/masked_share"]
    assert one_sided < two_sided, "dppo_tv drops only tokens that would move further away"


def test_the_step_is_scaled_by_the_effective_sample_size(tmp_path):
    rates = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    settings = ["optimizer.ess_scaling=sqrt", "optimizer.warmup_steps=2"]
    try:
        logged = metrics_of(go(tmp_path, *SHORT, *STALE, *settings).run)
    finally:
        hook.remove()
    assert rates == [logged[step, "train/lr"] for step in (1, 2, 3)]
    scheduled = {1: 5e-3, 2: 1e-2, 3: 1e-2}
    scaled = [rate * logged[step, "policy/ess"] ** 0.5 for step, rate in scheduled.items()]
    assert rates == pytest.approx(scaled)
    assert logged[3, "policy/ess"] < 0.999


def test_a_reference_is_replaced_once_the_kl_to_it_exceeds_its_bound_and_beta_aims_at_that_kl(tmp_path):
    """The copy is taken after the update, so the next one measures zero."""
    terms = "kl=[{estimator: exact, placement: loss, reference: periodic, beta: {target: 0.01}}]"
    settings = [
        "reference.period=null",
        "reference.max_kl=1.0e-9",
        "train.steps=4",
        "optimizer.lr=1.0e-2",
    ]
    logged = metrics_of(go(tmp_path, *SHORT, terms, *settings).run)
    steps = (1, 2, 3, 4)
    exceeds = [logged[step, "reference/periodic/exact_reverse_token"] > 1e-9 for step in steps]
    assert exceeds == [False, True, False, True]
    assert [logged[step, "reference/periodic/moved"] for step in steps] == exceeds
    assert logged[3, "kl/exact_reverse_token"] > 1e-6, "the initial policy is left behind"
    beta = logged[1, "beta/0"]
    target = BetaTarget(target=0.01)
    for step in steps:
        assert logged[step, "beta/0"] == pytest.approx(beta)
        beta = target.next(beta, logged[step, "reference/periodic/exact_reverse_sequence"])


def test_the_bound_of_a_reference_is_per_token_and_not_per_completion(tmp_path):
    """A bound between the two: the KL of a completion exceeds it, that of a token does not, and nothing moves."""
    terms = "kl=[{estimator: exact, placement: loss, reference: periodic, beta: 0.1}]"
    settings = [*SHORT, terms, "reference.period=null", "train.steps=2", "optimizer.lr=1.0e-2"]
    free = metrics_of(go(tmp_path / "free", *settings, "reference.max_kl=1.0e+9").run)
    of_token = free[2, "reference/periodic/exact_reverse_token"]
    of_completion = free[2, "reference/periodic/exact_reverse_sequence"]
    assert 0 < 1.5 * of_token < of_completion
    between = math.sqrt(of_token * of_completion)
    for bound, moves in ((between, 0.0), (0.9 * of_token, 1.0)):
        run = go(tmp_path / str(moves), *settings, f"reference.max_kl={bound!r}").run
        assert metrics_of(run)[2, "reference/periodic/moved"] == moves


def test_the_measured_kl_is_that_to_the_terms_own_reference():
    values = {
        "train/length": 3.0,
        "kl/exact_reverse_sequence": 1.0,
        "kl/k1_reverse_sequence": 2.0,
        "teacher/k1_reverse_sequence": 4.0,
        "reference/ema/exact_reverse_sequence": 5.0,
        "reference/ema/k1_reverse_sequence": 6.0,
        "kl/k3_policy_behaviour_token": 0.5,
    }
    expected = {"initial": 1.0, "teacher": 4.0, "ema": 5.0, "sampler": 1.5}
    # The sampler's has no metric per sequence: 0.5 per token times 3 tokens.
    assert {name: measured_kl(values, name, "sequence") for name in expected} == expected
    # With past policies it is measured.
    values["reference/sampler/exact_reverse_sequence"] = 7.0
    assert measured_kl(values, "sampler", "sequence") == 7.0


PERIODIC = "kl.0.reference=periodic"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reference.max_kl=0.1"], r"^reference\.max_kl: no KL term has reference: periodic"),
        ([PERIODIC, "reference.period=null"], r"^reference\.period: got None.*never move"),
        ([PERIODIC, "reference.max_kl=0"], r"^reference\.max_kl: got 0"),
        (["optimizer.ess_scaling=root"], r"^optimizer\.ess_scaling: got 'root'"),
        (["algorithm.dpo={}", "kl=[]", "optimizer.ess_scaling=sqrt"], r"^optimizer\.ess_scaling.*importance weights"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        check_training(load_config(TINY, overrides))
