"""One repetition in a process of its own; run.py starts it: child.py JOB.json writes its result beside the job."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

sys.path = [str(Path(__file__).resolve().parents[1]), *(p for p in sys.path if Path(p) != Path(__file__).parent)]

SIDES = {"ours": "ours", "trl": "trl_side", "torchrl": "torchrl_side"}


def main(path: Path) -> None:
    from importlib import import_module

    from speed.variants import VARIANTS

    job = json.loads(path.read_text())
    warnings.filterwarnings("ignore")
    variant = VARIANTS[job["variant"]]
    side = import_module(f"speed.{SIDES[variant.system]}")
    found = side.run(
        job["task"],
        variant,
        model=Path(job["model"]),
        updates=job["updates"] + 1,
        seed=job["seed"],
        output=path.parent / "output",
    )
    import torch

    found["threads"] = torch.get_num_threads()
    path.with_suffix(".found").write_text(json.dumps({**job, **found}))
    # A library's own threads must not keep a measured process alive.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
