"""The Python API: certify a KL term, explain another framework's flags, train, and tabulate runs.

    from kl_comedy import KLTerm, certify, explain, kl_surrogate, register_estimator, results_table, train

docs/stability.md says what stays as it is from version to version. ``certify`` and ``explain`` need torch alone;
``train`` and ``results_table`` need the extra ``train`` and import its packages when they are called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kl_comedy.errors import UserError, bad_value
from kl_comedy.extras import named_extras, require
from kl_comedy.kl import REGIMES, KLTerm, recipe
from kl_comedy.kl.oracle.certificate import certify as certify_terms
from kl_comedy.kl.oracle.certificate_record import Certificate
from kl_comedy.kl.oracle.part_claims import check_parts
from kl_comedy.peers.advice import what_to_use
from kl_comedy.peers.launch_files import read_launch_file
from kl_comedy.peers.systems import Advice, Reading, advise, find_system, is_peer, read
from kl_comedy.records import RUN_SCORES
from kl_comedy.registry import ESTIMATORS, RECIPES

if TYPE_CHECKING:
    import pandas as pd

    from kl_comedy.training.run_folder import Outcome

Estimator = TypeVar("Estimator", bound=Callable[..., Any])

STATUSES = ("finished", "running", "failed", "killed")
"""Values of ``status`` of :func:`results_table`."""


# --- KL terms -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, repr=False)
class Certification:
    """What KL terms optimize, by enumeration in float64: one certificate per regime.

    ``false_claims`` says in sentences which claims do not hold: those of the terms, and those of their estimators and
    corrections. It is empty for every part that comes with the package.
    """

    name: str
    terms: tuple[KLTerm, ...]
    certificates: Mapping[str, Certificate]
    false_claims: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every claim holds."""
        return not self.false_claims

    def assert_ok(self) -> Certification:
        """Return this record. Raises AssertionError with the false claims where there are any."""
        if self.false_claims:
            raise AssertionError("claims that do not hold:\n  " + "\n  ".join(self.false_claims))
        return self

    def __str__(self) -> str:
        lines = [f"{regime}: {certificate.verdict}" for regime, certificate in self.certificates.items()]
        return "\n".join([self.name, *lines, *self.false_claims])

    def __repr__(self) -> str:
        # What a Python prompt shows: the verdicts, not the record of 4,000 characters.
        return str(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: a row per regime, and the false claims."""
        return _html(self.name, self.certificates, self.false_claims)


def certify(
    terms: KLTerm | Sequence[KLTerm] | str, *, regimes: Sequence[str] = REGIMES, seed: int = 0
) -> Certification:
    """Compute by exact enumeration which gradient KL terms have, on-policy, off-policy and with mixed versions.

    Args:
        terms: a term, several terms that act together, or the name of a recipe (``kl-comedy list recipes``).
        regimes: those of :data:`kl_comedy.kl.REGIMES` to certify.
        seed: draws the settings that are checked beside the fixed ones. The same seed gives the same verdict.

    Raises:
        UserError: an unknown recipe or regime.

    >>> certified = certify(KLTerm("k3", placement="loss"), regimes=["on_policy"])
    >>> certified.ok, certified.certificates["on_policy"].target
    (True, 'token_forward')
    >>> print(certified)  # doctest: +ELLIPSIS
    k3_reverse_token in loss
    on_policy: optimizes the forward KL of each visited prefix, not the reverse KL its value estimates; ...
    """
    # Before the enumeration, which takes seconds.
    for regime in regimes:
        if regime not in REGIMES:
            raise bad_value("regimes", regime, REGIMES)
    if isinstance(terms, str):
        name = terms
        chosen = recipe(terms, key="terms")
    else:
        chosen = (terms,) if isinstance(terms, KLTerm) else tuple(terms)
        # An empty sequence is allowed: its certificate says that nothing holds the policy to the reference.
        name = " + ".join(term.label() for term in chosen) or "no KL"

    # A wrong claim of a part makes every certificate that uses it doubtful: it is reported with them.
    estimator_options: dict[str, list[Mapping[str, Any]]] = {}
    for term in chosen:
        estimator_options.setdefault(term.estimator, []).append(term.options)
    corrections = dict.fromkeys(term.correction for term in chosen)
    false_claims, _ = check_parts(estimator_options, corrections, seed=seed)

    certified = certify_terms(name, chosen, regimes=regimes, seed=seed)
    certificates = {certificate.regime: certificate for certificate in certified}
    for certificate in certificates.values():
        if certificate.false_claim is not None:
            false_claims.append(certificate.false_claim)
    return Certification(name=name, terms=chosen, certificates=certificates, false_claims=tuple(false_claims))


@dataclass(frozen=True, kw_only=True, repr=False)
class Explanation:
    """What a recipe, or the KL flags of another framework, optimize.

    ``terms`` are the equivalent KL terms: empty where no KL acts, None where no term of ours is equivalent (then
    ``reading.instead`` says what the framework does). ``certificates`` has one certificate per regime in which the
    terms are what the framework does. ``notes`` and ``no_ops`` are sentences: what to know beside the terms, and which
    flags are set and do nothing. ``advice`` has the framework's own flags that do better. ``what_to_use`` says for
    fresh and for stale samples whether these terms are advised, and what to use instead. ``reading`` is the reading of
    the flags, None for a recipe.
    """

    text: str
    terms: tuple[KLTerm, ...] | None
    certificates: Mapping[str, Certificate]
    notes: tuple[str, ...] = ()
    no_ops: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    what_to_use: tuple[str, ...] = ()
    reading: Reading | None = None

    def __str__(self) -> str:
        lines = [f"{regime}: {certificate.verdict}" for regime, certificate in self.certificates.items()]
        return "\n".join([self.text, *lines, *self._sentences()])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: a row per regime, and the sentences."""
        return _html(self.text, self.certificates, self._sentences())

    def _sentences(self) -> list[str]:
        sentences = []
        if self.terms is None and self.reading is not None:
            sentences.append(f"no term is equivalent: {self.reading.instead}")
        if self.terms == ():
            sentences.append("no KL: nothing regularizes the policy toward a reference")
        return [*sentences, *self.notes, *self.no_ops, *self.what_to_use]


def _html(title: str, certificates: Mapping[str, Certificate], sentences: Sequence[str]) -> str:
    """A table of certificates, and sentences below it. Texts may be a user's flags or names: each is escaped."""
    parts = [f"<p><code>{escape(title)}</code></p>"]
    if certificates:
        rows = ["<tr><th>regime</th><th>optimizes</th><th>verdict</th></tr>"]
        for regime, certificate in certificates.items():
            cells = [regime, certificate.optimizes, certificate.verdict]
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        parts.append(f"<table>{''.join(rows)}</table>")
    if sentences:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        parts.append(f"<ul>{items}</ul>")
    return "".join(parts)


def explain(what: str | Path, *, system: str | None = None, overrides: Sequence[str] = ()) -> Explanation:
    """Say what a recipe, or the KL flags of another framework, optimize; ``kl-comedy explain`` prints the same.

    Args:
        what: a recipe (``grpo``), ``SYSTEM:FLAGS`` (``verl:use_kl_loss=true``), or the path of a launch script or
            config of another framework.
        system: the framework of a file, where the file does not show it.
        overrides: ``key=value`` for what a file leaves open.

    Raises:
        UserError: neither a recipe, flags nor a file; an unknown flag or value; a file that cannot be read.

    >>> explain("verl:use_kl_loss=true,kl_loss_type=low_var_kl").terms[0].estimator
    'k3'
    >>> explain("grpo").certificates["on_policy"].target
    'token_forward'
    """
    text = str(what)
    if text not in RECIPES and os.path.isfile(text):  # Path.is_file raises for a long text
        reading = read_launch_file(Path(text), system=system, overrides=overrides).reading()
        return _explain_reading(reading)
    # Not ignored: a mistyped path would otherwise be read as flags or as a recipe, without what it was given with.
    if system is not None or overrides:
        raise UserError(f"system and overrides need a file; {text!r} is not one")
    if is_peer(text):
        return _explain_reading(read(text))
    terms = recipe(text, key="what")
    certificates = {}
    # A recipe without KL has no gradient to certify.
    if terms:
        certificates = {certificate.regime: certificate for certificate in certify_terms(text, terms)}
    return Explanation(text=text, terms=terms, certificates=certificates, what_to_use=tuple(what_to_use(terms)))


def _explain_reading(reading: Reading) -> Explanation:
    return Explanation(
        text=reading.text,
        terms=reading.terms,
        certificates=reading.certificates(),
        notes=reading.notes,
        no_ops=reading.no_ops,
        advice=advise(find_system(reading.system)),
        what_to_use=tuple(what_to_use(reading.terms or (), reading.holds_in)),
        reading=reading,
    )


def register_estimator(
    name: str,
    *,
    source: str,
    needs: str = "log_ratio",
    claims: tuple[str, ...] = (),
    summary: str | None = None,
    **facts: Any,
) -> Callable[[Estimator], Estimator]:
    """Decorator that registers a KL estimator under ``name`` and returns the function unchanged.

    The function takes the log-ratio ``log pi - log ref`` (nats, any shape) and returns an estimate of the same shape
    (nats), without mask, coefficient or clamp. Its further parameters need defaults and become ``KLTerm.options``.

    Args:
        name: as ``KLTerm(name)`` and ``kl: [{estimator: name}]`` take it.
        source: the paper and equation, or the code, that it comes from.
        needs: what the function reads: ``log_ratio``, or another input of :attr:`kl_comedy.kl.KLTerm.needs`.
        claims: what is true of it, as ``pathwise:token_reverse``; :func:`certify` checks it (CONTRIBUTING.md).
        summary: one line; the docstring's first line by default.
        **facts: further facts, as ``options={"width": {"above": 0}}`` for the bounds of its options.

    Raises:
        UserError: the name is taken, or there is neither a docstring nor a summary.

    >>> @register_estimator("k2_api_example", source="Schulman 2020", claims=("pathwise:token_reverse", "nonnegative"))
    ... def k2_again(log_ratio):
    ...     '''Half the squared log-ratio.'''
    ...     return 0.5 * log_ratio**2
    >>> certify(KLTerm("k2_api_example", placement="loss"), regimes=["on_policy"]).ok
    True
    """
    return ESTIMATORS.register(name, source=source, summary=summary, claims=claims, needs=needs, **facts)


# --- runs ---------------------------------------------------------------------------------------------------------
def train(config: str | Path, *overrides: str, plugins: Iterable[str | Path] = ()) -> pd.Series:
    """Train as a config says, like ``kl-comedy train``, and return the run as one row; needs the extra ``train``.

    Args:
        config: the path of a YAML config, or a name of ``kl-comedy list configs``.
        overrides: ``key=value`` words, as ``kl.0.beta=0.05`` or ``resume=auto``.
        plugins: Python files that register parts which the config names.

    Returns:
        A row with ``name``, ``seed``, ``status``, ``kl``, ``run_id`` (None where no store was reached), ``folder``,
        ``seconds``, the last value of each training metric by its name (docs/metrics.md), and
        ``eval/<set>/reward`` and ``eval/<set>/accuracy`` after the last evaluation. ``pandas.DataFrame([row, ...])``
        is a table of runs.

    Raises:
        UserError: a mistake in the config, or the extra ``train`` is not installed.
        RunFailed: a run that began and could not finish.
        RunStopped: a signal asked the run to stop; it saved a checkpoint, and ``resume=auto`` resumes it.

    With ``train.devices`` above 1 each further process runs the calling script again, so call it under
    ``if __name__ == "__main__":``.

    >>> import tempfile
    >>> small = ["train.steps=1", "rollout.prompts_per_batch=2", "rollout.group_size=2", "rollout.max_new_tokens=2"]
    >>> small += ["data.eval.heldout.limit=4", "tracking.uri=none"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     row = train("configs/quickstart.yaml", *small, f"output={folder}")
    >>> row["status"], row["kl"]
    ('FINISHED', '0.03 k1_reverse_token in reward to_go')
    """
    from kl_comedy.config import load_config
    from kl_comedy.config.shipped import find_config
    from kl_comedy.redaction import redact_command, refuse_secrets
    from kl_comedy.registry import load_plugin_file

    require("train")
    words = ["kl-comedy", "train", str(config), *overrides]
    with named_extras():
        for file in plugins:
            # The path becomes part of the run's command, which is stored and shown.
            refuse_secrets({"plugins": str(file)})
            load_plugin_file(file)
            words += ["--plugin", str(file)]
        loaded = load_config(find_config(config), list(overrides))

        # Imported after the config is read: a mistake in it is reported at once, and training takes seconds to import.
        from rich.console import Console

        from kl_comedy.training.run import train as train_run

        # Progress goes to stderr: a caller's own output on stdout stays clean.
        outcome = train_run(loaded, console=Console(stderr=True), command=redact_command(words))
    return _row(outcome)


def _row(outcome: Outcome) -> pd.Series:
    """A run's summary as one flat row."""
    import pandas as pd

    summary = outcome.summary
    row: dict[str, Any] = {name: summary.get(name) for name in ("name", "seed", "status", "kl", "run_id")}
    row["folder"] = str(outcome.run.path)
    row["seconds"] = summary.get("seconds")
    row |= summary.get("metrics", {})
    for key, score in RUN_SCORES.items():
        for name, history in summary.get(key, {}).items():
            # The keys are texts, as JSON has them: "9" would be greater than "10".
            last_update = max(history, key=int)
            row[f"eval/{name}/{score}"] = history[last_update]
    # object: the numbers of a row keep their types beside its texts.
    return pd.Series(row, dtype=object)


def results_table(
    uri: str | Path = "sqlite:///mlflow.db",
    *,
    metrics: Sequence[str] = ("eval/*/reward",),
    group: Sequence[str] = ("name", "kl.label"),
    pool: Sequence[str] = (),
    experiment: str | None = None,
    where: str | None = None,
    status: Sequence[str] = ("finished",),
    of: str = "last",
    interval: str = "t",
) -> pd.DataFrame:
    """Mean and 95% interval over seeds of metrics of runs, one row per group and metric; needs the extra ``train``.

    The rows are those of ``kl-comedy results table --format json``: of runs with the same config and seed the newest
    counts, and keys in which the runs of a group differ, seeds aside, become columns unless ``pool`` names them.

    Args:
        uri: an MLflow store, or the path of an export (``kl-comedy results export``).
        metrics: names of metrics; ``*`` matches anything.
        group: config keys or tags that make a row.
        pool: config keys in which the runs of one row may differ.
        experiment: only this experiment's runs.
        where: a filter, as ``"seed = 0 and algorithm.advantage = 'rloo'"``.
        status: which runs count: finished, running, failed, killed.
        of: which value of a run: last, recorded, first, best, lowest or mean:K (the mean of the last K).
        interval: ``t`` or ``bootstrap``.

    Returns:
        Columns: the keys of ``group``, further keys in which runs differ, ``metric``, ``n`` (seeds), ``mean``, ``low``,
        ``high``, ``runs``, ``failed``, and ``collapsed`` where the runs measured the metric of the default rule.
        ``attrs["notes"]`` is a list of sentences, those that the command prints: what is left out, pooled, mixed,
        stale or collapsed.

    Raises:
        UserError: an unknown key, metric, status or rule, no store at ``uri``, or a missing extra.
        RunFailed: no run matches.

    >>> where = "tags.sweep = 'evidence_core' and optimizer.lr = 0.0003 and kl.label = 'no KL'"
    >>> table = results_table("results/evidence/export.parquet", metrics=["eval/heldout/reward"], where=where)
    >>> table[["kl.label", "n", "mean"]].round(3).to_dict("records")
    [{'kl.label': 'no KL', 'n': 5, 'mean': 0.492}]
    """
    require("results")
    # Checked here, because an unknown status would match no run and look like an empty study.
    for name in status:
        if name not in STATUSES:
            raise bad_value("status", name, STATUSES)
    # MLflow writes them in capitals.
    counted = [name.upper() for name in status]
    with named_extras():
        from kl_comedy.results.compare import summarize
        from kl_comedy.results.runs import short
        from kl_comedy.results.selection import OptionNames, RunQuery, choose_runs, with_run_values

        query = RunQuery(
            uri=str(uri),
            experiment=experiment,
            where=where,
            metrics=metrics,
            group=group,
            pool=pool,
            statuses=counted,
            of=of,
            options=OptionNames(group="group", pool="pool", metric="metrics"),
        )
        chosen = with_run_values(query, choose_runs(query))
        table = summarize(chosen.frame, chosen.groups, chosen.metrics, interval, counted)
    table = table.assign(metric=table["metric"].map(short)).rename(columns=short)
    table.attrs["notes"] = chosen.notes
    return table
