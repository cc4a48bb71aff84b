"""What axes and column heads say: words and unit of every metric, and the range that its values have.

A test compares the names and units with docs/metrics.md.

pi is the policy, ref the reference, mu the sampler. ``<x>`` stands for any part of a name.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence

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
    "train/gold": ("gold verdict in training", "per completion"),
    "train/gold/<part>": ("gold verdict in training: <part>", "per completion"),
    "train/length": ("completion length", "tokens"),
    "train/truncated_share": ("truncated completions", SHARE),
    "train/turns": ("turns of the policy", "turns/dialogue"),
    "train/rows": ("rows that the model reads", "rows/dialogue"),
    "train/environment_tokens": ("tokens of the environment", "tokens/dialogue"),
    "train/environment_failed": ("dialogues whose environment failed", SHARE),
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
    "reference/sampler/mismatch": ("|log past policy/μ|", PER_TOKEN),
    "reference/sampler/mismatch_max": ("largest |log past policy/μ|", "nats"),
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
    "policy/kept_mass": ("policy's probability of the kept tokens", "mean over tokens"),
    "kl/truncation_token": ("-log of the reference's mass on the kept tokens", "nats/token"),
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
    "eval/<set>/proxy": ("proxy reward", "per problem"),
    "eval/<set>/proxy_half_width": ("half-width of the proxy reward's interval", ""),
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
    "time/tokens_per_second_per_device": ("throughput of a device", "tokens/s"),
    "time/flop_utilization": ("model FLOP utilization", "share of measured products"),
    "time/peak_memory": ("largest memory so far", "GiB"),
    "time/transfer": ("publishing the weights", "s"),
    "stream/queue_depth": ("groups ready", "batches"),
    "stream/replaced_groups": ("replaced groups", "prompts"),
    "stream/dropped_groups": ("dropped groups", "prompts"),
    "stream/sampler_restarts": ("restarts of samplers", ""),
}
"""Name to words and unit; of several that match, the first counts."""

KEY_LABELS = {
    "kl.label": "KL terms",
    "kl.family": "KL family",
    "kl.betas": "beta",
    "kl.beta": "beta",
    "optimizer.lr": "learning rate",
    "lag.steps": "lag",
    "algorithm.updates_per_batch": "updates of a batch",
}
"""Key of a group to its words; another key has its name without dots and underscores."""

UNITS_OF_HEADS = ("nats", "tokens", "s", "updates")
"""Units without a denominator that a column head says; a share or a mean reward is plain without its unit."""

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
    eval_set, name = _split_evaluation(metric)
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


def _split_evaluation(metric: str) -> tuple[str | None, str]:
    """The set of a metric that training has too and an evaluation measured, with its name there; else None, itself."""
    of_evaluation = _MEASURED_BY_EVALUATION.fullmatch(metric)
    if of_evaluation is None:
        return None, metric
    return of_evaluation[1], of_evaluation[2]


def _with_eval_set(words: str, eval_set: str | None) -> str:
    if eval_set is None:
        return words
    if eval_set == "heldout":
        return f"held-out {words}"
    return f"{words} on {eval_set.replace('_', ' ')}"


def _in_words(unit: str) -> tuple[str, str]:
    """What a unit is per, in words, and the unit itself: ``nats/completion`` is nats per completion.

    >>> _in_words("nats/completion"), _in_words("tokens/s"), _in_words("share")
    (('per completion', 'nats'), ('', 'tokens/s'), ('', 'share'))
    """
    measure, _, denominator = unit.partition("/")
    if denominator in ("token", "completion", "pair"):
        return f"per {denominator}", measure
    return "", unit


def axis_label(metric: str, width: int = 34, notes: Sequence[str] = ()) -> str:
    """Words and unit on lines of at most about ``width`` characters; ``notes`` say what else a reader of the axis must
    know, as ``log axis``.

    >>> axis_label("train/reward"), axis_label("train/reward", 24)
    ('training reward (per completion)', 'training reward\\n(per completion)')
    >>> axis_label("kl/exact_reverse_sequence", 60, ["log axis"])
    'exact KL(π‖ref) per completion (nats, log axis)'
    """
    words, unit = metric_label(metric)
    denominator, measure = _in_words(unit)
    # A metric's name in one piece is longer than the axis sometimes, but can still be searched for.
    lines = textwrap.wrap(words, width, break_long_words=False)
    last_line = _bracketed(denominator, [measure, *notes])
    if not last_line:
        return "\n".join(lines)
    one_line = f"{words} {last_line}"
    if len(lines) == 1 and len(one_line) <= width:
        return one_line
    # The unit in one piece on a line of its own, and so the notes where there is not room for both.
    if len(last_line) <= width:
        return "\n".join([*lines, last_line])
    own_lines = [_bracketed(denominator, [measure]), _bracketed("", notes)]
    return "\n".join([*lines, *(line for line in own_lines if line)])


def _bracketed(text: str, remarks: Sequence[str]) -> str:
    """``text`` with those remarks that are not empty in brackets behind it."""
    known = [remark for remark in remarks if remark]
    if not known:
        return text
    return f"{text} ({', '.join(known)})".strip()


def column_head(metric: str) -> str:
    """The head of a metric's column in a table for reading.

    >>> column_head("eval/heldout/reward"), column_head("eval/heldout/kl/exact_reverse_sequence")
    ('held-out reward', 'held-out exact KL(π‖ref) per completion (nats)')
    """
    words, unit = metric_label(metric)
    denominator, measure = _in_words(unit)
    if denominator:
        return f"{words} {denominator} ({measure})"
    if unit in UNITS_OF_HEADS:
        return f"{words} ({unit})"
    return words


def key_label(key: str) -> str:
    """The words for a key by which runs are grouped, without ``params.`` or ``tags.``.

    >>> key_label("optimizer.lr"), key_label("rollout.group_size")
    ('learning rate', 'rollout group size')
    """
    return KEY_LABELS.get(key, key.replace(".", " ").replace("_", " "))


_BETWEEN_0_AND_1 = re.compile(
    r"train/(reward|gold)(/.+)?|eval/[^/]+/(reward|proxy)|(kl|teacher|reference/[^/]+)/total_variation_token"
)
_NEVER_NEGATIVE = re.compile(
    r"(kl|teacher|reference/[^/]+)/(exact|k2|k3|total_variation)_\w+"
    r"|policy/(entropy|staleness|ratio|mismatch)\w*"
    r"|train/(length|reward_std)|eval/[^/]+/(length|tokens)|grad/\w*norm|time/\w+|kl/log_ratio_max"
)
_SHARES_BELOW_0 = ("value/explained_variance",)
"""Named a share, but negative where the value is worse than a constant."""


def metric_range(metric: str, values: Iterable[float]) -> tuple[float, float]:
    """The least and the greatest value that a metric can have: an interval beyond them is nonsense.

    Shares and rewards are in [0, 1], exact KL, k2, k3, lengths and norms are not negative. A reward of another scale
    shows itself in ``values``: where one of them is outside, there is no range.

    >>> metric_range("train/reward", [0.5]), metric_range("train/reward", [0.5, -1.0])
    ((0.0, 1.0), (-inf, inf))
    """
    _, name = _split_evaluation(metric)
    _, unit = metric_label(metric)
    low = -math.inf
    high = math.inf
    is_share = unit.startswith(SHARE) and name not in _SHARES_BELOW_0
    if is_share or _BETWEEN_0_AND_1.fullmatch(name):
        low = 0.0
        high = 1.0
    elif _NEVER_NEGATIVE.fullmatch(name):
        low = 0.0
    # Rounding puts an exact KL of 0 at -1e-9.
    slack = 1e-6
    known = [value for value in values if math.isfinite(value)]
    if any(value < low - slack or value > high + slack for value in known):
        return -math.inf, math.inf
    return low, high
