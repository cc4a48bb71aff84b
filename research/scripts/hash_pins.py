"""Write install/requirements.txt: the pins of install/constraints.txt with the SHA-256 of each file.

pip itself resolves the package under constraints.txt and reports the file that it would install of each requirement,
with its hash in the index; nothing is installed. The result holds for the platform and Python that run this. What
torch's CUDA build needs is included, so this also fails where the pins contradict it. `make verify-pins` checks it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADER = """\
# The files that install/constraints.txt names for Linux on x86-64 and Python 3.11, with the CUDA build of torch.
# Made by `python research/scripts/hash_pins.py`, checked by `make verify-pins`. To install:
#   pip install --require-hashes --no-deps -r install/requirements.txt && pip install --no-deps -e .
"""


def lock() -> str:
    """The text of install/requirements.txt, from PyPI alone."""
    words = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-", "--index-url", "https://pypi.org/simple"]
    words += ["-c", "install/constraints.txt", ".[train]"]
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    command = [sys.executable, "-m", "pip", "install", *words]
    report = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    lines = []
    for item in json.loads(report)["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        if name != "kl_comedy":
            digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{re.sub(r'[-_.]+', '-', name).lower()}=={version} --hash=sha256:{digest}\n")
    return HEADER + "".join(sorted(lines))


if __name__ == "__main__":
    (ROOT / "install" / "requirements.txt").write_text(lock())
