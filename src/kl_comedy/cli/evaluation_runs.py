"""The work of ``kl-comedy evaluate``: resolve the target, evaluate its sets and suites, return rows of scores."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from kl_comedy.config import Config, load_config
from kl_comedy.config.schema import SuiteConfig, SuiteFile
from kl_comedy.config.shipped import shipped_config
from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.evaluation import EvalSettings
from kl_comedy.evaluation import evaluate as evaluate_set
from kl_comedy.evaluation.evaluate import CHUNK
from kl_comedy.evaluation.likelihood import choice_scorer
from kl_comedy.evaluation.records import SuitePlan, SuiteRecords, choice_evaluator, completion_evaluator
from kl_comedy.evaluation.scores import check_ks, default_ks, score_choices, score_completions
from kl_comedy.evaluation.suites import get_suite, resolve_template, suite_problems, suite_prompts
from kl_comedy.models import LoadedModel, load_model, weights_hash
from kl_comedy.phases import within
from kl_comedy.plugins import PluginSet
from kl_comedy.progress import stages
from kl_comedy.records import Problem
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rewards import RewardSum, shared_pool
from kl_comedy.rollouts import RolloutBackend
from kl_comedy.rollouts.sampler import capabilities_of
from kl_comedy.tracking.store import clean_path
from kl_comedy.training.distributed import SINGLE_PROCESS
from kl_comedy.training.experience import derive_seed
from kl_comedy.training.export import export_policy
from kl_comedy.training.metrics import completion_metrics, load_eval_reference
from kl_comedy.training.problems import eval_sampling, load_problem_sets, render_prompts
from kl_comedy.training.run_folder import RunDir, step_of
from kl_comedy.training.run_plugins import plugins_of
from kl_comedy.training.sampling import with_environment


@dataclass(frozen=True, kw_only=True)
class Target:
    """The config whose ``model`` is evaluated, its name, and the run and update its weights come from."""

    config: Config
    label: str
    run: str | None = None
    step: int = 0

    def tags(self) -> dict[str, str]:
        """MLflow tags that name what was evaluated."""
        if self.run is None:
            return {"evaluated.model": self.config.model.source}
        return {"evaluated.model": self.label, "evaluated.run": self.run, "evaluated.step": str(self.step)}


@contextlib.contextmanager
def resolve_target(target: str, overrides: Sequence[str]) -> Iterator[Target]:
    """What ``target`` names: a config file, a run's folder, a checkpoint, or a model's folder or name.

    A run's weights are those of RUN/policy, else of its newest complete checkpoint. The weights of a checkpoint are
    written to a temporary folder for as long as the context lasts. Raises :class:`~kl_comedy.errors.UserError` for
    another target and for mistakes in the overrides.
    """
    path = Path(target)
    if not path.exists():
        # A folder here wins over a config's name, and both over a model of the hub.
        path = shipped_config(target) or path
    if path.suffix in (".yaml", ".yml"):
        config = load_config(path, overrides)
        yield Target(config=config, label=config.name)
        return

    is_checkpoint = path.suffix == ".ckpt"
    folder_of_run = path
    if is_checkpoint:
        folder_of_run = path.parent.parent  # RUN/checkpoints/NAME.ckpt
    # A run's folder has a config.yaml; a model's has a config.json.
    run = RunDir(path=folder_of_run)
    if not (run.path / "config.yaml").is_file():
        _refuse_missing_run(target)
        config = load_config(None, [f"model.source={target}", *overrides])
        yield Target(config=config, label=path.name or target)
        return

    read = run.config_reader()
    trained = read([])
    with tempfile.TemporaryDirectory(prefix="kl_comedy_policy_") as folder:
        if run.policy.is_dir() and not is_checkpoint:
            # The exported policy, where a run has one: no checkpoint has to be gathered.
            source = run.policy
            step = (run.summary() or {}).get("steps", trained.train.steps)
        else:
            source = Path(folder) / "policy"
            which = "newest"
            if is_checkpoint:
                which = str(step_of(path))
            step = step_of(export_policy(run, trained, source, which=which))
        config = read([f"model.source={source}", *_changes_for_exported(trained), *overrides])
        yield Target(config=config, label=f"{run.label}-{step}", run=run.label, step=step)


def _refuse_missing_run(target: str) -> None:
    """Raise :class:`UserError` for a path that is not there; what may be the id of a model of the hub passes."""
    path = Path(target)
    if path.exists():
        return
    is_local = target.startswith(("/", ".", "~")) or path.suffix == ".ckpt" or len(path.parts) > 2
    runs = [file.parent for file in sorted(path.parent.glob("*/config.yaml"))]
    # An id of the hub is OWNER/NAME, which looks like a run in a folder of runs.
    in_folder_of_runs = len(path.parts) == 2 and (bool(runs) or path.parts[0] == "runs")
    if not is_local and not in_folder_of_runs:
        return
    near = nearest(str(path), [str(run) for run in runs])
    hint = ""
    if near:
        hint = f"; did you mean {near}?"
    raise UserError(f"no such run, checkpoint or model: {target}{hint}")


def _changes_for_exported(trained: Config) -> list[str]:
    """What a run's config needs to read its exported policy, which is whole: adapters are merged, options applied."""
    changes = [*trained.model.overrides_for_exported(), "model.lora=null"]
    if trained.rollout.backend == "replay":
        # Recorded rollouts cannot answer the prompts of an evaluation.
        changes += ["rollout.backend=hf", "rollout.options={}"]
    return changes


def evaluate_sets(config: Config, console: Console) -> list[dict[str, Any]]:
    """Evaluate the sets of ``data.eval``; a row of scores per set. Raises :class:`UserError` where there is none."""
    if not config.data.eval:
        raise UserError("data.eval: names no set to evaluate on")
    problems = load_problem_sets(config, train=False)
    loaded = load_model(config.model)
    measure = completion_metrics(config, loaded=loaded, reference=load_eval_reference(config, loaded))
    # As in training, or the scores before, during and after it could not be compared.
    settings = EvalSettings(samples=config.eval.samples, sampling=eval_sampling(config), measure=measure)
    rows = []
    with (
        RewardSum(config.rewards, gold=config.gold, environment=config.environment) as scorer,
        _backend(config, loaded, None) as backend,
        stages(console, transient=True) as show,
    ):
        eval_sets = render_prompts(config, problems, loaded).evals
        for number, eval_set in enumerate(eval_sets):
            show("evaluating sets", number, len(eval_sets))
            # The seed of a run's own evaluations, so that scores here and there can be compared.
            seed = derive_seed(config.seed, f"eval/{eval_set.name}", 0)
            with within(eval_set.name):
                result = evaluate_set(backend, scorer, eval_set, settings, seed=seed)
            show("evaluating sets", number + 1, len(eval_sets))
            scores = result.row()
            rows.append(
                {
                    "set": result.name,
                    "problems": result.problems,
                    "samples": result.samples,
                    "reward": scores.pop("reward"),
                    "half_width_95": result.metrics().get(f"eval/{result.name}/reward_half_width"),
                    **scores,
                    "model": config.model.source,
                    "reference": config.eval.reference,
                }
            )
    return rows


@contextlib.contextmanager
def _backend(config: Config, loaded: LoadedModel, folder: Path | None) -> Iterator[RolloutBackend]:
    # The backend itself, not Sampler.of: nothing trains here, so nothing has to draw beside it.
    entry = ROLLOUTS.get(config.rollout.backend, key="rollout.backend")
    backend: Any = entry.fn(config.rollout, loaded=loaded)  # with work_in where its capabilities say so
    # A policy of dialogues is evaluated with its environment, on suites too.
    backend = with_environment(backend, config, loaded, shared_pool())
    try:
        # Only a suite has a folder; for sets the backend uses a temporary one.
        if folder is not None and capabilities_of(config.rollout.backend).needs_folder:
            backend.work_in(folder)
        yield backend
    finally:
        backend.close()


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The options of ``kl-comedy evaluate --suite``."""

    suites: Sequence[str]
    out: Path
    ks: Sequence[int] | None = None
    limit: int | None = None
    root: Path | None = None
    files: Mapping[str, SuiteFile] = field(default_factory=dict)
    template: str = "auto"
    interval: str = "auto"
    chunk: int = CHUNK


def evaluate_suites(target: Target, request: EvaluationRequest, console: Console) -> list[dict[str, Any]]:
    """Evaluate the suites in turn; a row of scores per suite.

    Mistakes in names, files, checksums, ``k`` and prompts raise :class:`UserError` before anything is sampled.
    """
    config = target.config
    # All names before the first file: a misspelt last suite should not cost the others' time.
    suites = [get_suite(name) for name in request.suites]
    _check_request(config, suites, request)
    # All files are read and their checksums compared before the model is loaded.
    problems = []
    for suite in suites:
        file = request.files.get(suite.name)
        problems.append(suite_problems(suite, root=request.root, file=file, limit=request.limit))

    loaded = load_model(config.model)
    # Records are found by the weights, so that a renamed folder of the same model resumes.
    weights = weights_hash(loaded.model)
    plans = []
    for suite, suite_rows in zip(suites, problems, strict=True):
        plans.append(_plan(config, suite, suite_rows, loaded, weights, request))

    rows = []
    with contextlib.ExitStack() as stack:
        # Made by the first suite that generates: suites of choices need no sampler.
        backend = functools.cache(lambda: stack.enter_context(_backend(config, loaded, request.out)))
        for plan in plans:
            records = SuiteRecords(path=request.out / clean_path(target.label) / plan.folder_name, plan=plan)
            # Before anything is sampled: a folder that cannot be written is found now.
            records.create()
            if records.missing():
                with contextlib.ExitStack() as during, _progress(console, records) as advance:
                    if plan.generates:
                        evaluator = during.enter_context(completion_evaluator(plan, backend()))
                    else:
                        evaluator = choice_evaluator(plan, choice_scorer(config, loaded, SINGLE_PROCESS))
                    records.evaluate(evaluator, advance)
            # Also where nothing was missing: the call before may have ended between its last chunk and this.
            records.merge()
            rows.append(_report(records, target, weights, request))
    return rows


def _check_request(config: Config, suites: Sequence[SuiteConfig], request: EvaluationRequest) -> None:
    """Raise :class:`UserError` for a file of another suite, an impossible k, and several greedy samples."""
    names = [suite.name for suite in suites]
    for name in request.files:
        if name not in names:
            raise bad_value("--data", name, names, "suites of this call")
    check_ks(request.ks or (), config.eval.samples)
    # Suites of choices score by likelihood, where samples and temperature mean nothing.
    generates = any(suite.kind == "generate" for suite in suites)
    several_greedy = config.eval.samples > 1 and config.eval.temperature == 0
    if generates and several_greedy:
        reason = "greedy samples are all the same; set eval.temperature, as 0.7"
        raise bad_value("eval.samples", config.eval.samples, "1 with eval.temperature 0", reason)


def _plan(
    config: Config,
    suite: SuiteConfig,
    problems: Sequence[Problem],
    loaded: LoadedModel,
    weights: str,
    request: EvaluationRequest,
) -> SuitePlan:
    """The evaluation of one suite. ``model`` in it identifies the records: a change there starts others."""
    template = resolve_template(suite, loaded.tokenizer, request.template)
    prompts, report = suite_prompts(suite, problems, loaded.tokenizer, template=template)
    rollout = config.rollout
    identity = {
        "weights": weights,
        "device": loaded.device.type,
        "options": dict(rollout.options),
        "dtype": config.model.dtype,
        "attention": config.model.attention,
        "share_prompt": config.model.share_prompt,
    }
    plugins = _plugins(config, suite).hashes
    # Without an environment there is no such key, as below.
    if config.environment is not None:
        identity["environment"] = dataclasses.asdict(config.environment)
    # A changed verifier is another evaluation. Without plugins there is no such key: stored records would not match.
    if plugins:
        identity["plugins"] = plugins
    return SuitePlan(
        suite=suite,
        prompts=prompts,
        template=template,
        samples=config.eval.samples,
        seed=config.seed,
        seeds=functools.partial(derive_seed, config.seed),
        chunk=request.chunk,
        sampling=eval_sampling(config, suite),
        model={**identity, "backend": rollout.backend, "batch_sequences": rollout.batch_sequences},
        left_out={"too_long": report.too_long, "control_tokens": report.control_tokens},
    )


def _plugins(config: Config, suite: SuiteConfig) -> PluginSet:
    """What the records of a suite depend on: its parts and the sampler, not the parts that only training uses."""
    return plugins_of(Config(rollout=config.rollout, environment=config.environment), suite)


@contextlib.contextmanager
def _progress(console: Console, records: SuiteRecords) -> Iterator[Callable[[int], None]]:
    """Progress in problems; those of earlier calls count as done. Yields the function that advances it."""
    plan = records.plan
    total = len(plan.prompts)
    # So that the bar of a resumed evaluation does not begin at zero.
    done = total - sum(len(plan.problems_of(chunk)) for chunk in records.missing())
    with stages(console) as show:
        show(f"{plan.suite.name} problems", done, total)

        def advance(problems: int) -> None:
            nonlocal done
            done += problems
            show(f"{plan.suite.name} problems", done, total)

        yield advance


def _report(records: SuiteRecords, target: Target, weights: str, request: EvaluationRequest) -> dict[str, Any]:
    """Score the records, write the scores beside them, and track them once."""
    plan = records.plan
    rows = records.rows()
    if plan.generates:
        ks = default_ks(plan.samples) if request.ks is None else request.ks
        result = score_completions(plan.suite.name, rows, ks=ks, method=request.interval)
    else:
        result = score_choices(plan.suite.name, rows, method=request.interval)
    tags = target.tags()
    # Null for choices: a likelihood is not sampled.
    temperature = None
    if plan.generates:
        temperature = plan.sampling.temperature
    row = {
        "suite": result.name,
        "kind": plan.suite.kind,
        "problems": result.problems,
        "samples": result.samples,
        "temperature": temperature,
        "template": plan.template,
        "interval": request.interval,
        **result.row(),
        **{f"left_out_{reason}": count for reason, count in plan.left_out.items()},
        "model": tags["evaluated.model"],
        "weights": weights,
        "records": str(records.path),
    }
    # Before the row is tracked: a store that cannot be reached must not cost the scores.
    records.write_summary(row)
    tags |= _plugins(target.config, plan.suite).tags()
    tags["evaluated.weights"] = weights
    records.track(result, target.config.tracking, tags=tags, step=target.step)
    return row


def evaluate_run(
    run: Path, summary: Mapping[str, Any], overrides: Sequence[str], records: Path, console: Console
) -> list[dict[str, Any]]:
    """Evaluate a finished run by the command in its ``summary``, with ``overrides``; a row per set and suite.

    Records of suites are written below ``records``; an interrupted call resumes there.
    """
    # The command is "kl-comedy evaluate CONFIG KEY=VALUE ...".
    config_file, *recorded_overrides = shlex.split(summary["evaluate_command"])[2:]
    config = load_config(config_file, [*recorded_overrides, *overrides])
    suites = config.eval.suites
    if not config.data.eval and not suites:
        raise UserError("evaluate: names nothing to evaluate on; data.eval and eval.suites are empty")

    rows: list[dict[str, Any]] = []
    if config.data.eval:
        rows += evaluate_sets(config, console)
    if suites:
        step = summary["steps"]
        label = RunDir(path=run).label
        target = Target(config=config, label=f"{label}-{step}", run=label, step=step)
        root = None if config.eval.data_root is None else Path(config.eval.data_root)
        request = EvaluationRequest(suites=suites, out=records, root=root)
        rows += evaluate_suites(target, request, console)
    return rows
