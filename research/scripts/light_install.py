"""Install the wheel without extras in a new environment, and run there what must work with torch alone.

    python research/scripts/light_install.py [--python PYTHON ...]

Builds the wheel, makes a virtual environment in a temporary folder for each PYTHON (default: the one that runs this,
and the newest that is found here and that torch has a wheel for), installs the wheel under install/constraints.txt,
and runs ``certify``, ``explain``, the example of the Python API and the example of docs/conformance.md. Fails where
one of them fails, and where a package of the extra ``train`` is installed or imported. Prints the wheel's size, the
installed packages and the imported ones.

The environment of the caller decides where pip finds packages (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). On Linux set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, or pip takes torch's CUDA build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORBIDDEN = ("lightning", "pytorch-lightning", "transformers", "mlflow", "datasets", "peft", "accelerate")
"""Distributions that only the extra ``train`` may bring."""

NEWEST_MINOR = 14
"""torch 2.13 has wheels for Python 3.14 at most."""

COMMANDS = (
    ("certify", "grpo", "rb/per_decision"),
    ("certify", "quickstart"),
    ("list", "configs"),
    ("explain", "grpo"),
    ("explain", "verl:use_kl_loss=true,kl_loss_type=low_var_kl"),
)

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


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command with nothing of this checkout on its path, and return its stdout.

    Raises SystemExit where the command fails.
    """
    arguments = [str(argument) for argument in command]
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    environment.pop("PYTHONHOME", None)
    # stderr stays that of this script, so that pip's errors are seen as they come.
    completed = subprocess.run(arguments, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
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


def check(python: str, wheel: Path, folder: Path) -> None:
    """Install ``wheel`` for one Python and run the examples. Raises SystemExit where the install is not light."""
    started = time.monotonic()
    run(python, "-m", "venv", folder / "venv")
    new_python = folder / "venv" / "bin" / "python"
    run(new_python, "-m", "pip", "install", "-qq", "-c", ROOT / "install" / "constraints.txt", wheel)
    install_s = time.monotonic() - started

    installed = installed_versions(new_python)
    imported = run_examples(new_python, folder)
    total_s = time.monotonic() - started

    version = run(new_python, "-c", "import platform; print(platform.python_version())").strip()
    packages = [f"{name} {installed[name]}" for name in sorted(installed)]
    print(f"Python {version}: installed in {install_s:.0f} s, all in {total_s:.0f} s")
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


def newest_python() -> str | None:
    """The newest Python here that is newer than this one and at most :data:`NEWEST_MINOR`; None without one."""
    for minor in range(NEWEST_MINOR, sys.version_info.minor, -1):
        candidates = [shutil.which(f"python3.{minor}")]
        # pyenv puts a python3.N on the path that runs only where this version is selected.
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        candidates += [str(path) for path in sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python"))]
        for python in candidates:
            if python is None:
                continue
            started = subprocess.run([python, "-c", ""], capture_output=True)
            if started.returncode == 0:
                return python
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", help="interpreters to try; default: this one and the newest here")
    pythons = parser.parse_args().python
    if pythons is None:
        pythons = [sys.executable]
        newest = newest_python()
        if newest is None:
            print("no newer Python is here: only this one is tried")
        else:
            pythons.append(newest)
    with tempfile.TemporaryDirectory(prefix="kl_comedy_light_") as temporary:
        folder = Path(temporary)
        wheel = build_wheel(folder)
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MiB")
        for number, python in enumerate(pythons):
            folder_of_python = folder / str(number)
            folder_of_python.mkdir()
            check(python, wheel, folder_of_python)


if __name__ == "__main__":
    main()
