"""The bugs that ``tests/mutation.py`` plants: rules of :mod:`mutation_rules`, each planted at the one place it fits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One bug: what it does, the pattern it replaces, and what by.

    ``inside``: text of the function or class it belongs to, where the pattern alone fits elsewhere too. ``tests``:
    words for pytest; without any, the tests of the package that it is planted in.
    """

    name: str
    old: str
    new: str
    inside: str | None = None
    tests: str = ""


BLIND = (
    Mutant(
        "a cosine schedule goes a quarter of the way round",
        "0.5 * (1.0 - math.cos(math.pi * $done))",
        "1.0 - math.cos(0.5 * math.pi * $done)",
    ),
    Mutant(
        "a term with a batch baseline does not wait for the update's costs",
        '$baseline in ("before", "own", "batch")',
        '$baseline in ("before", "own")',
    ),
    Mutant(
        "cap_mode each bounds the log-ratio by the cap itself",
        "$delta.clamp(max=math.log($cap))",
        "$delta.clamp(max=$cap)",
    ),
    Mutant(
        "gae does not discount the next value",
        "$reward($returns, $mask) + $gamma * $next - $value",
        "$reward($returns, $mask) + $next - $value",
    ),
    Mutant(
        "dropped sequences stay in the denominator of sequence_sum",
        "$counts / ($counts.sum().clamp(min=1.0) * $constant)",
        "$counts / (len($counts) * $constant)",
    ),
    Mutant(
        "a pair counts whose worse completion has no verdict",
        "$pairs & $judged[:, None] & $judged[None]",
        "$pairs & $judged[:, None]",
    ),
    Mutant(
        "a prefix sum of policy corrections counts the token itself",
        "torch.nn.functional.pad($sum($cost)[:, :-1], (1, 0))",
        "$sum($cost)",
    ),
    Mutant(
        "an adapter is merged in the weights' own dtype",
        "$weight.float() + $scaling * ($b.float() @ $a.float())",
        "$weight + $scaling * ($b @ $a)",
    ),
    Mutant(
        "a moving average is stored in the model's dtype",
        "$weight.to(torch.promote_types($weight.dtype, torch.float32), copy=True)",
        "$weight.clone()",
    ),
    Mutant(
        "a last batch that is not used up is never requested",
        "keyword: iterations=-(-$steps // $updates)",
        "keyword: iterations=$steps // $updates",
    ),
    Mutant(
        "a resumed run forgets which dropped prompts were to be drawn again",
        '$buffer.$returned = deque($state["returned"])',
        "$buffer.$returned = deque()",
    ),
    Mutant(
        "a micro-batch takes one group more than its budget",
        "$tokens($rows, $group) * (len($batch) + 1) > $budget",
        "$tokens($rows, $group) * len($batch) > $budget",
    ),
    Mutant(
        "the sampler's idle share is of its busy time",
        "$idle / ($idle + $busy)",
        "$idle / $busy",
        inside="time/sampler_idle_share",
    ),
    Mutant("resubmit leaves out cells that were never submitted", "$missing = $states[3:]", "$missing = $states[4:]"),
    Mutant(
        "a sweep's report shows the first evaluation of a run",
        "float($history[str($row.steps)])",
        "float(list($history.values())[0])",
    ),
    Mutant(
        "a range by step loses its end to rounding",
        "math.floor(($last - $first) / $step + 1e-9) + 1",
        "math.floor(($last - $first) / $step) + 1",
    ),
    Mutant(
        "of more points than one upload takes the first are sent again",
        "{$kind: $items[$start : $start + $size]}",
        "{$kind: $items[:$size]}",
    ),
    Mutant(
        "a spool with damaged lines hides as many lost ones",
        "max($numbers, default=-1) + 1 - (len($events) - $damaged)",
        "max($numbers, default=-1) + 1 - len($events)",
    ),
    Mutant("the column n is that of a group's first metric", '$lines["n"].max()', '$lines["n"].iloc[0]'),
    Mutant(
        "stop strings are measured in characters",
        "len($text.encode())",
        "len($text)",
        inside="A string of n bytes spans at most n tokens",
    ),
    Mutant(
        "a server's failures count over the whole run",
        "$server.$failures, $server.$failure = 0, None",
        "$server.$failure = None",
    ),
    Mutant(
        "a sum of rewards has the status of its first part",
        "max(($reward.status for $reward in $row), key=$statuses.index)",
        "$row[0].status",
    ),
    Mutant(
        "the length reward divides by full",
        "(len($completion) - $free) / ($full - $free)",
        "(len($completion) - $free) / $full",
    ),
    Mutant(
        "a p-value adjusted by Holm exceeds 1", "min(1.0, $p * (len($order) - $rank))", "$p * (len($order) - $rank)"
    ),
    Mutant(
        "maj@k votes over a last block that is too short",
        "range(0, len($answers) - $k + 1, $k)",
        "range(0, len($answers), $k)",
    ),
    Mutant(
        "policy drop refuses the smallest lag that works",
        '$lag.policy == "drop" and $lag.max_steps < $updates',
        '$lag.policy == "drop" and $lag.max_steps <= $updates',
    ),
    Mutant(
        "optimizer.betas may be 1",
        "all(0 <= $beta < 1 for $beta in $betas)",
        "all(0 <= $beta <= 1 for $beta in $betas)",
    ),
    Mutant(
        "a batch over two epochs may hold one prompt twice",
        "set($before[$items - $shared :])",
        "set($before[$items - $shared + 1 :])",
    ),
    Mutant(
        "a task's question is not compared with evaluation sets",
        "{$normalize($text) for $text in ($problem.text, $question) if isinstance($text, str)}",
        "{$normalize($problem.text)}",
    ),
    Mutant(
        "records of later chunks are numbered from 0",
        "keyword: start=$first",
        "keyword: start=0",
        inside="The likeliest choice is picked",
    ),
)
"""Written from the code alone, before their author read a test or the rules above."""
