"""What axes say: the words and the unit of every metric. A test compares the names and units with docs/metrics.md.

pi is the policy, ref the reference, mu the sampler. ``<x>`` stands for any part of a name.
"""

from __future__ import annotations

import re
import textwrap

PER_TOKEN = "nats/token"
PER_COMPLETION = "nats/completion"
SHARE = "share"
SHARE_OF_TOKENS = "share of tokens"
SHARE_OF_COMPLETIONS = "share of completions"

# In the order in which they are tried: kl/<k>_behaviour_token would match kl/k1_policy_behaviour_token too, so that the
# longer name stands first.
LABELS: dict[str, tuple[str, str]] = {
    "train/reward": ("training reward", "per completion"),
    "train/reward_std": ("standard deviation of training reward", ""),
    "train/reward/<part>": ("training reward: <part>", "per completion"),
    "train/length": ("completion length", "tokens"),
    "train/truncated_share": ("truncated completions", SHARE),
    "train/groups_without_signal": ("groups without signal", SHARE),
    "train/verifier_<status>": ("completions: <status>", SHARE),
    "train/loss": ("loss", ""),
    "train/loss_policy": ("policy loss", ""),
    "train/loss_value": ("value loss", ""),
    "train/loss_kl_<n>": ("loss of KL term <n>", ""),
    "train/lr": ("learning rate", ""),
    "kl/exact_reverse_<level>": ("exact KL(π‖ref)", "nats/<level>"),
    "kl/exact_forward_<level>": ("exact KL(ref‖π)", "nats/<level>"),
    "kl/total_variation_<level>": ("total variation of π and ref", "probability/<level>"),
    "kl/log_ratio_max": ("largest |log π/ref|", "nats"),
    "kl/<k>_policy_behaviour_token": ("<k> of KL(π‖μ)", PER_TOKEN),
    "kl/<k>_behaviour_token": ("<k> of KL(μ‖π)", PER_TOKEN),
    "kl/<k>_reverse_<level>": ("<k> of KL(π‖ref)", "nats/<level>"),
    "teacher/exact_reverse_<level>": ("exact KL(π‖teacher)", "nats/<level>"),
    "teacher/exact_forward_<level>": ("exact KL(teacher‖π)", "nats/<level>"),
    "teacher/<k>_reverse_<level>": ("<k> of KL(π‖teacher)", "nats/<level>"),
    "reference/<name>/exact_reverse_<level>": ("exact KL(π‖<name> reference)", "nats/<level>"),
    "reference/<name>/exact_forward_<level>": ("exact KL(<name> reference‖π)", "nats/<level>"),
    "reference/<name>/<k>_reverse_<level>": ("<k> of KL(π‖<name> reference)", "nats/<level>"),
    "reference/<name>/moved": ("moves of the <name> reference", ""),
    "kl_error/<k>_reverse_<level>_rms": ("RMS error of <k>", "nats/<level>"),
    "kl_error/<k>_reverse_<level>": ("mean error of <k>", "nats/<level>"),
    "kl_term/<n>/value_token": ("estimate of KL term <n>", "nats/token"),
    "kl_term/<n>/ratio_max": ("largest ratio of KL term <n>", ""),
    "kl_term/<n>/capped_share": ("ratios of KL term <n> above the cap", SHARE_OF_TOKENS),
    "kl_term/<n>/clamped_share": ("tokens of KL term <n> beyond a clamp", SHARE),
    "beta/<n>": ("beta of KL term <n>", ""),
    "policy/entropy": ("policy entropy", PER_TOKEN),
    "policy/entropy_sequence": ("policy entropy", PER_COMPLETION),
    "policy/staleness": ("staleness", "updates"),
    "policy/staleness_p<q>": ("staleness, percentile <q>", "updates"),
    "policy/staleness_max": ("largest staleness", "updates"),
    "policy/ratio_p<q>": ("ratio π/μ, percentile <q>", ""),
    "policy/equal_weights_share": ("tokens drawn with the current weights", SHARE),
    "policy/mismatch": ("|log π/μ| at equal weights", PER_TOKEN),
    "policy/mismatch_max": ("largest |log π/μ| at equal weights", "nats"),
    "policy/ess": ("effective sample size", SHARE_OF_COMPLETIONS),
    "policy/behaviour_gap_max": ("largest |log π/μ|", "nats"),
    "policy/clip_fraction": ("clipped tokens", SHARE),
    "policy/correction/<name>/truncated_share": ("weights at the cap of <name>", SHARE_OF_TOKENS),
    "policy/correction/<name>/masked_share": ("tokens masked by <name>", SHARE),
    "policy/correction/<name>/weight_mean": ("mean weight of <name>", ""),
    "policy/correction/<name>/weight_max": ("largest weight of <name>", ""),
    "grad/norm": ("gradient norm before clipping", ""),
    "grad/value_norm": ("gradient norm of the value head", ""),
    "value/mean": ("mean value", "reward/token"),
    "value/target_mean": ("mean target of the value", "reward/token"),
    "value/explained_variance": ("explained variance of the value", SHARE),
    "value/clip_fraction": ("tokens with a clipped value", SHARE),
    "dpo/pairs": ("pairs", "per update"),
    "dpo/prompts": ("prompts with a pair", "per update"),
    "dpo/loss": ("DPO loss", "nats/pair"),
    "dpo/accuracy": ("DPO accuracy", "share of pairs"),
    "dpo/margin": ("DPO margin", "nats/pair"),
    "audit/reference_noise": ("noise of the reference gradient", "relative"),
    "audit/kl_to_policy_norm": ("KL gradient over policy gradient", "norms"),
    "audit/kl_projection": ("projection of the KL part of the clipped update", "policy gradient norms"),
    "audit/<term>/cosine": ("cosine with the reference gradient, <term>", ""),
    "audit/<term>/delivered": ("delivered share of the reference gradient, <term>", ""),
    "audit/<term>/bias": ("relative bias of the gradient, <term>", ""),
    "audit/<term>/variance": ("relative variance of the gradient, <term>", ""),
    "audit/<term>/kl_to_policy_norm": ("KL gradient over policy gradient, <term>", "norms"),
    "audit/<term>/silent_share": ("tokens without gradient, <term>", SHARE),
    "eval/<set>/reward": ("reward", "per problem"),
    "eval/<set>/reward_half_width": ("half-width of the reward's interval", ""),
    "eval/<set>/length": ("completion length", "tokens"),
    "eval/<set>/truncated_share": ("truncated completions", SHARE),
    "eval/<set>/accuracy": ("accuracy", SHARE),
    "eval/<set>/accuracy_norm": ("accuracy per character", SHARE),
    "eval/<set>/<score>_half_width": ("half-width of the interval of <score>", SHARE),
    "eval/<set>/<score>_se": ("standard error of <score>", SHARE),
    "eval/<set>/<score>_low": ("lower bound of <score>", SHARE),
    "eval/<set>/<score>_high": ("upper bound of <score>", SHARE),
    "eval/<set>/pass_at_<k>": ("pass@<k>", "share of problems"),
    "eval/<set>/maj_at_<k>": ("maj@<k>", "share of problems"),
    "eval/<set>/<status>_share": ("completions: <status>", SHARE),
    "eval/<set>/tokens": ("completion length", "tokens"),
    "time/generate": ("time of sampling", "s"),
    "time/score": ("time of scoring", "s"),
    "time/wait": ("waiting for the batch", "s"),
    "time/learn": ("time of learning", "s"),
    "time/step": ("time of an update", "s"),
    "time/trainer_idle_share": ("idle trainer", "share of time"),
    "time/sampler_idle_share": ("idle sampler", "share of time"),
    "time/sampler_cpu": ("CPU time of the sampler", "s"),
    "time/staleness": ("age of the weights", "s"),
    "time/staleness_p<q>": ("age of the weights, percentile <q>", "s"),
    "time/staleness_max": ("largest age of the weights", "s"),
    "time/audit": ("time of the audit", "s"),
    "time/tokens_per_second": ("throughput", "tokens/s"),
    "stream/queue_depth": ("groups ready", "batches"),
    "stream/dropped_groups": ("dropped groups", "prompts"),
    "stream/sampler_restarts": ("restarts of samplers", ""),
}
"""Name to words and unit; of several that match, the first counts."""

_MEASURED_BY_EVALUATION = re.compile(r"eval/([^/]+)/((?:kl|kl_error|policy)/.+)")
"""Metrics of training that an evaluation measures on its set too."""


def _pattern(name: str) -> re.Pattern[str]:
    """``<x>`` in a name of :data:`LABELS` as a group x: one part of a name; a reward's part may have slashes."""

    def group(placeholder: re.Match[str]) -> str:
        content = "[^/]+?"
        # As math_verify/verifier_failed.
        if placeholder[1] == "part":
            content = ".+"
        return f"(?P<{placeholder[1]}>{content})"

    return re.compile(re.sub(r"<(\w+)>", group, name))


_PATTERNS = [(_pattern(name), words, unit) for name, (words, unit) in LABELS.items()]


def metric_label(metric: str) -> tuple[str, str]:
    """The words and the unit of a metric; an unknown one has its name without underscores, and no unit.

    >>> metric_label("eval/heldout/kl/exact_reverse_sequence"), metric_label("my/own_metric")
    (('held-out exact KL(π‖ref)', 'nats/completion'), ('my: own metric', ''))
    """
    name = metric
    eval_set = None
    of_evaluation = _MEASURED_BY_EVALUATION.fullmatch(metric)
    if of_evaluation is not None:
        eval_set = of_evaluation[1]
        name = of_evaluation[2]
    for pattern, words, unit in _PATTERNS:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        parts = match.groupdict()
        for placeholder, part in parts.items():
            text = part.replace("_", " ")
            # A sum over a completion is called "sequence" in names and "completion" in words.
            if placeholder == "level" and part == "sequence":
                text = "completion"
            words = words.replace(f"<{placeholder}>", text)
            unit = unit.replace(f"<{placeholder}>", text)
        # A metric of evaluations has its set in its own name.
        if eval_set is None:
            eval_set = parts.get("set")
        return _with_eval_set(words, eval_set), unit
    # A metric of a plugin: its name can still be read.
    return metric.replace("_", " ").replace("/", ": "), ""


def _with_eval_set(words: str, eval_set: str | None) -> str:
    if eval_set is None:
        return words
    if eval_set == "heldout":
        return f"held-out {words}"
    return f"{words} on {eval_set.replace('_', ' ')}"


def axis_label(metric: str, width: int = 34) -> str:
    """Words and unit on lines of at most about ``width`` characters.

    >>> axis_label("train/reward"), axis_label("train/reward", 24)
    ('training reward (per completion)', 'training reward\\n(per completion)')
    """
    words, unit = metric_label(metric)
    # A metric's name in one piece is longer than the axis sometimes, but can still be searched for.
    lines = textwrap.wrap(words, width, break_long_words=False)
    if not unit:
        return "\n".join(lines)
    one_line = f"{words} ({unit})"
    if len(lines) == 1 and len(one_line) <= width:
        return one_line
    # The unit in one piece, on a line of its own.
    return "\n".join([*lines, f"({unit})"])
