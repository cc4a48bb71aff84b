"""Install the wheel without extras in a new environment, and run there what must work with torch alone.

    python research/scripts/light_install.py [--python PYTHON ...]

Builds the wheel, makes a virtual environment in a temporary folder for each PYTHON (default: the one that runs this),
installs the wheel under install/constraints.txt, and runs ``certify``, ``explain``, the example of the
Python API and the example of docs/conformance.md. Fails where one of them fails, and where a package of the extra
``train`` is installed or imported. Prints the wheel's size, the installed packages and the imported ones.

The environment of the caller decides where pip finds packages (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). On Linux set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, or pip takes torch's CUDA build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORBIDDEN = ("lightning", "pytorch-lightning", "transformers", "mlflow", "datasets", "peft", "accelerate")
"""Distributions that only the extra ``train`` may bring."""

COMMANDS = (
    ("certify", "grpo", "rb/per_decision"),
    ("certify", str(ROOT / "configs" / "quickstart.yaml")),
    ("explain", "grpo"),
    ("explain", "verl:use_kl_loss=true,kl_loss_type=low_var_kl"),
)

REPORT_IMPORTS = """
import atexit, importlib.metadata, json, sys

def write():
    distributions = importlib.metadata.packages_distributions()
    modules = {name.partition(".")[0] for name in sys.modules}
    imported = sorted({each for module in modules for each in distributions.get(module, ())})
    with open(IMPORTED, "a") as file:
        file.write(json.dumps(imported) + "\\n")

atexit.register(write)
"""
"""Written into the environment, where Python runs it at every start: each process reports what it imported."""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command with nothing of this checkout on its path; its stdout. The command's errors end this script."""
    words = [str(word) for word in command]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(words, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"light install: {' '.join(words)} exited {done.returncode}\n{done.stdout}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """The wheel of the committed sources and of what is changed in this checkout, in ``folder``."""
    copy = folder / "source"  # setuptools writes build/ beside the sources
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src", cwd=ROOT).split("\0")
    for name in ["pyproject.toml", "README.md", "LICENSE", *filter(None, files)]:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy)
    (wheel,) = folder.glob("kl_comedy-*.whl")
    return wheel


def conformance_example(folder: Path) -> Path:
    """The first example of docs/conformance.md as a script."""
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert block is not None, "docs/conformance.md has no example"
    tests = re.findall(r"^def (test_\w+)\(", block[1], flags=re.MULTILINE)
    assert tests, "the example of docs/conformance.md has no test"
    script = folder / "conformance_example.py"
    script.write_text(block[1] + "".join(f"\n{test}()\n" for test in tests), encoding="utf-8")
    return script


def check(python: str, wheel: Path, folder: Path) -> None:
    """Install ``wheel`` for one Python and run the examples. Raises SystemExit where the install is not light."""
    began = time.monotonic()
    run(python, "-m", "venv", folder / "venv")
    new_python = folder / "venv" / "bin" / "python"
    run(new_python, "-m", "pip", "install", "-qq", "-c", ROOT / "install" / "constraints.txt", wheel)
    installed_s = time.monotonic() - began

    # A wheel of another build tag keeps torch's version and adds a local part, as 2.13.0+cpu.
    listed = json.loads(run(new_python, "-m", "pip", "list", "--format", "json"))
    installed = {each["name"].lower().replace("_", "-"): each["version"] for each in listed}
    site = Path(run(new_python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    imports = folder / "imports.jsonl"
    (site / "report_imports.py").write_text(f"IMPORTED = {str(imports)!r}\n{REPORT_IMPORTS}")
    (site / "report_imports.pth").write_text("import report_imports\n")

    work = folder / "work"
    work.mkdir()
    for words in COMMANDS:
        run(new_python.with_name("kl-comedy"), *words, cwd=work)
    run(new_python, ROOT / "examples" / "own_trainer.py", "--steps", "5", cwd=work)
    run(new_python, conformance_example(work), cwd=work)

    processes = [json.loads(line) for line in imports.read_text().splitlines()]
    assert len(processes) == len(COMMANDS) + 2, "a process did not report what it imported"
    imported = {name.lower().replace("_", "-") for names in processes for name in names}
    version = run(new_python, "-c", "import platform; print(platform.python_version())").strip()
    print(f"Python {version}: installed in {installed_s:.0f} s, all in {time.monotonic() - began:.0f} s")
    print(f"  {len(installed)} packages: {', '.join(f'{name} {installed[name]}' for name in sorted(installed))}")
    print(f"  imported: {', '.join(sorted(imported))}")
    heavy = {name for name in FORBIDDEN if name in installed or name in imported}
    if heavy:
        raise SystemExit(f"light install: {', '.join(sorted(heavy))} must come with the extra train only")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to try")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kl_comedy_light_") as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MiB")
        for number, python in enumerate(arguments.python):
            part = folder / str(number)
            part.mkdir()
            check(python, wheel, part)


if __name__ == "__main__":
    main()
