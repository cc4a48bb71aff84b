"""CUDA semantics without a GPU: an update at the shape of a 7B model cut to two layers, as one rank of four.

Numbers, kernels' own limits, real time and NCCL are not proved by this.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.shapes.cases import CASES

ROOT = Path(__file__).parents[2]
SHAPE = "qwen2.5-7b"
LAYERS = 2


class Tracer:
    """Counts of cases, each traced once; see :mod:`tests.shapes.worker`."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.shapes.worker", str(folder)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers = {}

    def __call__(self, name, *, rank=0, plant=None, shape=SHAPE, layers=LAYERS):
        """The counts of a case; ``error`` is in them where it raised one."""
        if rank > 0 and plant is None:
            self(name, shape=shape, layers=layers)  # its exchanges stand for those of the other ranks
        request = {"name": name, "rank": rank, "plant": plant, "shape": shape, "layers": layers}
        line = json.dumps(request)
        if line not in self._answers:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            self._answers[line] = json.loads(self.process.stdout.readline())
        return self._answers[line]


@pytest.fixture(scope="module")
def tracer(tmp_path_factory):
    tracer = Tracer(tmp_path_factory.mktemp("shapes"))
    yield tracer
    tracer.process.stdin.close()
    tracer.process.wait()


def faults(counts) -> list[str]:
    """What is wrong with an update, whatever its counts are."""
    if "error" in counts:
        return [counts["error"]]
    found = []
    for part in counts.values():
        found += part["violations"]
    found += [f"{name} has no gradient" for name in counts["update"]["without_gradient"]]
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_update_has_no_fault(tracer, name):
    counts = tracer(name)
    assert faults(counts) == [], counts.get("where")
