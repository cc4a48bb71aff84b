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
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--index-url", "https://pypi.org/simple", "-c", "install/constraints.txt", ".[train]"]
    # A mirror or a local folder of the caller may hold other builds of the same versions, with other hashes.
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    completed = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)

    lines = []
    for item in json.loads(completed.stdout)["install"]:
        metadata = item["metadata"]
        # The project itself is installed from the checkout, and has no file in the index.
        if metadata["name"] == "kl_comedy":
            continue
        normalized_name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{normalized_name}=={metadata['version']} --hash=sha256:{digest}\n")
    return HEADER + "".join(sorted(lines))


if __name__ == "__main__":
    (ROOT / "install" / "requirements.txt").write_text(lock())
