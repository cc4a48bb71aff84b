"""``kl-comedy conformance``: what a KL loss optimizes, yours or that of an installed trainer."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.cli.common import choice_option, options_in_a_record, parse_yaml
from kl_comedy.errors import RunFailed, UserError, bad_value

if TYPE_CHECKING:
    from kl_comedy.conformance import Report

Target = Annotated[str, typer.Argument(metavar="TARGET", help="trl, verl, module:function, or path/file.py:function")]
Claims = Annotated[
    str | None,
    typer.Option("--claims", help="What it must optimize on-policy: token_reverse, ..., or '{off_policy: none}'"),
]
Regimes = Annotated[
    list[str] | None, typer.Option("--regime", help="on_policy, off_policy or mixed (default: all three)")
]
Arguments = Annotated[
    str | None,
    typer.Option("--arguments", help="A tensor for each parameter: '{policy: logp, batch: {keep: mask}}'"),
]
Options = Annotated[str | None, typer.Option("--options", help="Further options of the function: '{kind: k3}'")]


@dataclass(frozen=True, kw_only=True)
class ConformanceOptions:
    """Options of ``kl-comedy conformance``."""

    target: Target
    claims: Claims = None
    regime: Regimes = None
    beta: Annotated[float | None, typer.Option("--beta", help="What the coefficient must be")] = None
    masked_tokens: Annotated[
        str,
        choice_option(
            "--masked-tokens",
            "zero",
            "left_out",
            "absent",
            help="what masked tokens within completions are in your loss (left_out: your own sum leaves them out)",
        ),
    ] = "zero"
    near_only: Annotated[bool, typer.Option("--near-only", help="For losses that clamp")] = False
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the drawn policies")] = 0
    arguments: Arguments = None
    options: Options = None
    result: Annotated[str | None, typer.Option("--result", help="Key of the loss in what it returns")] = None


# The pipe and the stdout of the process in which a loss is called; None where the command does not run in a child.
_report_pipe: int | None = None
_stdout_file: tuple[int, int] | None = None


def run_in_a_child() -> None:
    """Go on in a child process; this one exits with its exit code, and never with 0 where it printed no whole report.

    A loss may end its process (``os._exit(0)``, a crash), and would then pass for one that is right.
    """
    global _report_pipe, _stdout_file
    # A caller that collects what is printed runs the command in its own process, which is not copied.
    if sys.stdout is not sys.__stdout__:
        return
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _report_pipe = writer
        _stdout_file = _file_of_stdout()
        return
    os.close(writer)
    _, status = os.waitpid(child, 0)
    # Not read to the end of the file: what a loss has started may outlive the child.
    os.set_blocking(reader, False)
    try:
        reported_by = os.read(reader, 100).decode("ascii", "replace")
    except BlockingIOError:
        reported_by = ""
    code = os.waitstatus_to_exitcode(status)
    if code < 0 or (code == 0 and reported_by != str(child)):
        how = f"signal {-code}" if code < 0 else "exit code 0"
        print(f"failed: TARGET ended its process ({how}) before the report was complete", file=sys.stderr)
        code = 1
    # Nothing of this process is left to do: the child printed everything.
    os._exit(code)


def _file_of_stdout() -> tuple[int, int]:
    stat = os.fstat(1)
    return stat.st_dev, stat.st_ino


def _report_complete() -> None:
    """Tell the parent process that the report was printed where it belongs. Raises OSError for a closed stdout."""
    sys.stdout.flush()
    if _report_pipe is not None and _file_of_stdout() == _stdout_file:
        # With the process id: a copy of the process that a loss forked off reports too.
        os.write(_report_pipe, str(os.getpid()).encode())


@options_in_a_record
def conformance(wanted: ConformanceOptions) -> None:
    """Compute what a KL loss optimizes on-policy, off-policy and with mixed policy versions, by enumeration in float64.

    TARGET is a function, or a trainer of this environment, whose own functions are then called. Exit code 1 when a
    claim fails, or when masked tokens, padding or a dtype of training spoil the loss.

    Example: `kl-comedy conformance examples/conformance/kl_losses.py:kl_loss --claims token_reverse --regime on_policy`

    Example: `kl-comedy conformance verl`
    """
    from kl_comedy.conformance.released import SYSTEMS, released

    stdout = sys.stdout  # a loss may put another in its place
    failed = []
    if ":" not in wanted.target:
        if wanted.target not in SYSTEMS:
            raise bad_value("TARGET", wanted.target, (*SYSTEMS, "module:function", "path/file.py:function"))
        if wanted.arguments or wanted.options or wanted.result:
            raise UserError(f"--arguments, --options, --result: not for {wanted.target}, whose functions are known")
        version, losses = released(wanted.target)
        for loss in losses:
            title = f"{wanted.target} {version}, {loss.settings}"
            print(f"{title} ({loss.function})", file=stdout)
            report = _checked(loss.loss, wanted)
            print(f"{report}\n", file=stdout)
            if not report.ok:
                failed.append(title)
    else:
        report = _checked(_adapted(wanted), wanted)
        print(report, file=stdout)
        if not report.ok:
            failed.append(wanted.target)
    sys.stdout = stdout
    _report_complete()
    if failed:
        raise RunFailed("not what it should be: " + "; ".join(failed))


def _checked(loss: Callable[..., Any], wanted: ConformanceOptions) -> Report:
    """The report of one loss. Without claims it says what the loss optimizes, and only problems fail."""
    from kl_comedy.conformance import check
    from kl_comedy.kl.claims import REGIMES

    claims: str | dict[str, Any] = {}
    if wanted.claims is not None:
        claims = wanted.claims
        if claims.startswith("{"):
            claims = _mapping("--claims", claims)
    return check(
        loss,
        claims=claims,
        masked_tokens=wanted.masked_tokens,
        near_only=wanted.near_only,
        regimes=tuple(wanted.regime or REGIMES),
        seed=wanted.seed,
        beta=wanted.beta,
    )


def _adapted(wanted: ConformanceOptions) -> Callable[..., Any]:
    """The function that was named, with its options, parameters and result as asked for."""
    from kl_comedy.conformance import adapt

    loss = _named_function(wanted.target)
    if wanted.options is not None:
        options = _mapping("--options", wanted.options)
        loss = functools.partial(loss, **options)
    if wanted.arguments is not None:
        return adapt(loss, _mapping("--arguments", wanted.arguments), wanted.result)
    if wanted.result is not None:
        raise UserError("--result: name the parameters too (--arguments)")
    return loss


def _mapping(option: str, text: str) -> dict[str, Any]:
    # Of a bare word the parser makes a mapping with an empty value.
    if not text.startswith("{"):
        raise bad_value(option, text, "a mapping, as '{name: value}'")
    value: dict[str, Any] = parse_yaml(option, text)
    return value


def _named_function(target: str) -> Callable[..., Any]:
    """The function, module or object after the colon. Raises :class:`UserError` where it cannot be imported."""
    place, _, name = target.rpartition(":")
    if not place or ("/" in place and not place.endswith(".py")):
        raise bad_value("TARGET", target, ("module:function", "path/file.py:function"))
    module = _module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
            raise bad_value("TARGET", name, names, f"a name in {place}")
        found = getattr(found, part)
    if not callable(found):
        raise bad_value("TARGET", name, "a function or a module that can be called", f"in {place}")
    loss: Callable[..., Any] = found
    return loss


def _module(place: str) -> Any:
    """A module by its dotted name, or a file by its path."""
    try:
        if not place.endswith(".py"):
            # As `python -m` does: the package under test is often the one in the current folder.
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(place)
        if not Path(place).is_file():
            raise UserError(f"TARGET: no such file: {place}")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None and spec.loader is not None  # it ends in .py
        module = importlib.util.module_from_spec(spec)
        # As `python file.py` does: its neighbours can be imported, and dataclasses find the module by its name.
        sys.path.insert(0, str(Path(place).resolve().parent))
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
        return module
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        # A script that ends the process would end this one too, perhaps with the exit code of a success.
        raise UserError(f"TARGET: {place} cannot be imported: {type(error).__name__}: {error}") from error
