"""Install the wheel in a new environment, and run there what must work with torch alone; with ``--train``, a run too.

    python research/scripts/light_install.py [--python PYTHON] [--train]

Builds the wheel and makes a virtual environment of PYTHON (default: the one that runs this) in a temporary folder.
Installs the wheel under install/constraints.txt, and runs ``certify``, ``explain``, the example of the Python API and
the example of docs/conformance.md. Fails where one of them fails, and where a package of the extra ``train`` is
installed or imported. Prints the wheel's size, the installed packages and the imported ones.

``--train`` then adds ``WHEEL[train]`` to the environment, runs the first commands of a newcomer in an empty folder (a
short run, its table, ``explain``), and prints them with their output.

The environment of the caller decides where pip finds packages (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). On Linux set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, or pip takes torch's CUDA build (4.5 GB).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORBIDDEN = ("lightning", "pytorch-lightning", "transformers", "mlflow", "datasets", "peft", "accelerate")
"""Distributions that only the extra ``train`` may bring."""

CONSTRAINTS = ROOT / "install" / "constraints.txt"

COMMANDS = (
    ("certify", "grpo", "rb/per_decision"),
    ("certify", "quickstart"),
    ("list", "configs"),
    ("explain", "grpo"),
    ("explain", "verl:use_kl_loss=true,kl_loss_type=low_var_kl"),
)

TRAIN_COMMANDS = (
    (("train", "quickstart", "train.steps=3", "train.eval_every=0", "data.eval.heldout.limit=32"), "finished in"),
    (("results", "table"), "k1_reverse_token in reward"),
    (("explain", "verl:use_kl_loss=true,kl_loss_type=low_var_kl"), "It follows"),
)
"""The commands of ``--train``, each with a text that its output must have."""

REPORT_IMPORTS = """
import atexit, importlib.metadata, json, sys

def write():
    distributions_of = importlib.metadata.packages_distributions()
    imported = set()
    for module in list(sys.modules):
        imported.update(distributions_of.get(module.partition(".")[0], ()))
    with open(IMPORTED, "a") as file:
        file.write(json.dumps(sorted(imported)) + "\\n")

atexit.register(write)
"""
"""Written into the environment, where Python runs it at every start: each process reports what it imported."""


def run(*command: str | Path, cwd: Path | None = None, with_stderr: bool = False) -> str:
    """Run a command with nothing of this checkout on its path, and return its stdout.

    ``with_stderr``: return what it prints on stderr too, in the order of a terminal. Raises SystemExit where the
    command fails.
    """
    arguments = [str(argument) for argument in command]
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    environment.pop("PYTHONHOME", None)
    # Each process would compile torch's modules again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # Otherwise stderr stays that of this script, so that pip's errors are seen as they come.
    stderr = subprocess.STDOUT if with_stderr else None
    completed = subprocess.run(arguments, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    if completed.returncode != 0:
        raise SystemExit(f"light install: {' '.join(arguments)} exited {completed.returncode}\n{completed.stdout}")
    return completed.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout, with its uncommitted changes, in ``folder``."""
    # A copy, because setuptools writes build/ beside the sources.
    copy = folder / "source"
    folders = ("src", "configs", "slurm/profiles")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders, cwd=ROOT)
    names = ["pyproject.toml", "setup.py", "README.md", "LICENSE"]
    names += listed.rstrip("\0").split("\0")
    for name in names:
        source = ROOT / name
        # git also lists a file that was deleted and not yet committed as such.
        if not source.is_file():
            continue
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy)
    (wheel,) = folder.glob("kl_comedy-*.whl")
    return wheel


def conformance_example(folder: Path) -> Path:
    """Write the first example of docs/conformance.md as a script that calls each of its tests."""
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert block is not None, "docs/conformance.md has no example"
    tests = re.findall(r"^def (test_\w+)\(", block[1], flags=re.MULTILINE)
    assert tests, "the example of docs/conformance.md has no test"
    # pytest is no dependency of the wheel: the script calls the tests itself.
    calls = "".join(f"\n{test}()\n" for test in tests)
    script = folder / "conformance_example.py"
    script.write_text(block[1] + calls, encoding="utf-8")
    return script


def install(python: Path, requirement: str) -> None:
    """Install ``requirement`` in an environment, given by its Python."""
    # Compiling all of torch's modules takes longer than the rest: Python compiles the imported ones by itself.
    run(python, "-m", "pip", "install", "-qq", "--no-compile", "-c", CONSTRAINTS, requirement)


def check(python: Path, wheel: Path, folder: Path) -> None:
    """Install ``wheel``, run the examples, and print what is installed. Raises SystemExit where it is not light."""
    started = time.monotonic()
    install(python, str(wheel))
    install_s = time.monotonic() - started

    installed = installed_versions(python)
    imported = run_examples(python, folder)
    total_s = time.monotonic() - started

    version = run(python, "-c", "import platform; print(platform.python_version())").strip()
    packages = [f"{name} {installed[name]}" for name in sorted(installed)]
    print(f"light install: Python {version}, installed in {install_s:.0f} s, all in {total_s:.0f} s")
    print(f"  {len(installed)} packages: {', '.join(packages)}")
    print(f"  imported: {', '.join(sorted(imported))}")

    # Imported and not installed is possible: the environment's Python may see packages of the system.
    present = imported | set(installed)
    heavy = sorted(present.intersection(FORBIDDEN))
    if heavy:
        raise SystemExit(f"light install: {', '.join(heavy)} must come with the extra train only")


def installed_versions(python: Path) -> dict[str, str]:
    """The version of each installed distribution, by its normalized name."""
    listed = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
    return {normalized(item["name"]): item["version"] for item in listed}


def normalized(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def run_examples(python: Path, folder: Path) -> set[str]:
    """Run the commands and examples, and return the distributions that any of their processes imported."""
    imports = folder / "imports.jsonl"
    # Python imports what a .pth file of its site-packages names at every start.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "report_imports.py").write_text(f"IMPORTED = {str(imports)!r}\n{REPORT_IMPORTS}")
    (site / "report_imports.pth").write_text("import report_imports\n")

    # An empty folder: in the checkout's root, Python would import kl_comedy from the sources.
    work = folder / "work"
    work.mkdir()
    for arguments in COMMANDS:
        run(python.with_name("kl-comedy"), *arguments, cwd=work)
    run(python, ROOT / "examples" / "own_trainer.py", "--steps", "5", cwd=work)
    run(python, conformance_example(work), cwd=work)

    reports = [json.loads(line) for line in imports.read_text().splitlines()]
    assert len(reports) == len(COMMANDS) + 2, "a process did not report what it imported"
    imported: set[str] = set()
    for names in reports:
        imported.update(normalized(name) for name in names)
    return imported


def check_train(python: Path, wheel: Path, folder: Path) -> None:
    """Add the extra ``train``, and print what a newcomer's first commands print in an empty folder.

    Raises SystemExit where a command fails, and where its output lacks what it must have.
    """
    started = time.monotonic()
    install(python, f"{wheel}[train]")
    run(python, "-m", "pip", "check")
    print(f"with the extra train: {len(installed_versions(python))} packages in {time.monotonic() - started:.0f} s")
    work = folder / "work_of_train"
    work.mkdir()
    module = run(python, "-c", "import kl_comedy; print(kl_comedy.__file__)", cwd=work).strip()
    if not Path(module).is_relative_to(folder):
        raise SystemExit(f"light install: {module} was imported, which is not what the wheel installed")
    for arguments, expected in TRAIN_COMMANDS:
        print(f"$ {shlex.join(['kl-comedy', *arguments])}")
        output = run(python.with_name("kl-comedy"), *arguments, cwd=work, with_stderr=True)
        print(output)
        if expected not in output:
            raise SystemExit(f"light install: this output lacks {expected!r}")
    print(f"extra train: all in {time.monotonic() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter; default: the one that runs this")
    parser.add_argument("--train", action="store_true", help="also install the extra train, and train")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kl_comedy_light_") as temporary:
        folder = Path(temporary)
        wheel = build_wheel(folder)
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MiB")
        run(arguments.python, "-m", "venv", folder / "venv")
        python = folder / "venv" / "bin" / "python"
        check(python, wheel, folder)
        if arguments.train:
            check_train(python, wheel, folder)


if __name__ == "__main__":
    main()
