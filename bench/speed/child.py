"""One repetition in its own process, started by run.py: `child.py JOB.json` writes JOB.result."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

sys.path = [str(Path(__file__).resolve().parents[1]), *(p for p in sys.path if Path(p) != Path(__file__).parent)]

RUNNERS = {"ours": "kl_comedy_runner", "trl": "trl_runner", "torchrl": "torchrl_runner"}


def main(path: Path) -> None:
    from importlib import import_module

    from speed.variants import VARIANTS

    job = json.loads(path.read_text())
    warnings.filterwarnings("ignore")
    variant = VARIANTS[job["variant"]]
    runner = import_module(f"speed.{RUNNERS[variant.system]}")
    result = runner.run(
        job["task"],
        variant,
        model=Path(job["model"]),
        updates=job["updates"] + 1,
        seed=job["seed"],
        output=path.parent / "output",
    )
    import torch

    result["threads"] = torch.get_num_threads()
    path.with_suffix(".result").write_text(json.dumps({**job, **result}))
    # Exit without waiting for threads that a library started.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
