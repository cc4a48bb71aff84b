"""Run one repetition in its own process. run.py starts it as `child.py JOB.json`; it writes JOB.result."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
# `import speed` needs the folder bench. This folder must not be on the path: Python puts a script's folder there, and
# names such as `setup` or `memory` would then hide modules of other packages.
sys.path = [str(HERE.parent), *(p for p in sys.path if Path(p) != Path(__file__).parent)]

RUNNERS = {"ours": "kl_comedy_runner", "trl": "trl_runner", "torchrl": "torchrl_runner"}


def main(path: Path) -> None:
    from speed.variants import VARIANTS

    job = json.loads(path.read_text())
    warnings.filterwarnings("ignore")
    variant = VARIANTS[job["variant"]]
    # Only this system's runner: the memory of another system's libraries would count as its own.
    runner = importlib.import_module(f"speed.{RUNNERS[variant.system]}")
    result = runner.run(
        job["task"],
        variant,
        model=Path(job["model"]),
        updates=job["updates"] + 1,  # the warm-up too
        seed=job["seed"],
        output=path.parent / "output",
    )
    import torch

    result["threads"] = torch.get_num_threads()
    path.with_suffix(".result").write_text(json.dumps({**job, **result}))
    # Exit without waiting for threads that a library started and never ends.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
