"""Compare the planned with the measured time of updates over 1-2 trainer ranks x 1-2 engines on CPUs.

    OMP_NUM_THREADS=1 python bench/scaling.py                      all cells, on a quiet machine; writes results/scaling
    OMP_NUM_THREADS=1 python bench/scaling.py --cells 1x1 2x1      these cells only
    python bench/scaling.py --page                                 write the page of the recorded times

Each cell is `kl-comedy train` with `hf_server` engines, one thread per process, and at most two processes that compute
at the same time. The measured time is wall time, from the run's own metrics. The plan is computed when the page is
written, for one core of the machine that the cells ran on.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# First on the path, and only once, however this file was started: `speed` and `pocket_run` are folders and files here.
sys.path = [str(HERE), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]

from pocket_run import SETTINGS  # noqa: E402
from speed.machine import describe  # noqa: E402

ROOT = HERE.parent
OUT = ROOT / "results" / "scaling"
FILE = OUT / "scaling.json"
SKIPPED = 2
"""Updates before the timed ones: servers start in the first."""
TIMED = 6
LAST = 1
"""Updates after the timed ones: in the last, an asynchronous run samples nothing ahead."""
POCKET = {"hidden_size": 384, "layers": 6, "heads": 6, "intermediate_size": 1536, "warmstart_steps": 0}
COMMON = [
    *SETTINGS,
    f"model.options={json.dumps(POCKET)}",
    "model.device=cpu",
    "rollout.backend=hf_server",
    "rollout.prompts_per_batch=32",
    "rollout.group_size=8",
    "rollout.max_new_tokens=32",
    "train.microbatch_tokens=512",
    "train.exact_kl_every=0",
]
TWO_RANKS = ["train.strategy=fsdp", "train.devices=2"]
TWO_ENGINES = ["rollout.options={servers: 2}"]
QUIET = 0.2
"""Cores that other programs may use during a cell: ranks wait for each other in every layer, so a delay multiplies."""
PR_SET_CHILD_SUBREAPER = 36
"""From <sys/prctl.h>; Python has no name for it."""
CELLS: dict[str, list[str]] = {
    "1x1": [],
    "1x2": TWO_ENGINES,
    "2x1": TWO_RANKS,
    "2x2": [*TWO_RANKS, *TWO_ENGINES],
    "2x1, ddp": ["train.strategy=ddp", "train.devices=2"],
    "1x1, async": ["lag.mode=async", "lag.max_steps=1"],
}
"""Trainer ranks x engines."""
PARTS = {"generate": "time/generate", "learn": "time/learn", "update": "time/step"}
"""A run's metrics. ``learn`` ends when the engines have the new weights, which asynchronous ones load before they
sample."""


def measure(name: str) -> dict[str, Any]:
    """Train a cell by the command line. Returns mean seconds per update by part, and the mean completion length.

    Exits if other programs used more than :data:`QUIET` cores meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="scaling_") as folder:
        config = Path(folder) / "scaling.yaml"
        config.write_text("name: scaling\n")
        settings = [*COMMON, *CELLS[name], f"train.steps={SKIPPED + TIMED + LAST}", f"output={folder}/runs"]
        command = [sys.executable, "-m", "kl_comedy.cli", "train", str(config), *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        others_before = busy_s() - own_s()
        start = time.monotonic()
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
        # Servers outlive the command for a moment: their CPU time would count as that of other programs.
        reap_orphans()
        cores_of_others = (busy_s() - own_s() - others_before) / (time.monotonic() - start)
        if cores_of_others > QUIET:
            sys.exit(f"cell {name}: other programs took {cores_of_others:.2f} cores; measure on a quiet machine")
        (spool,) = Path(folder).glob("runs/*/spool.jsonl")
        events = [json.loads(line) for line in spool.read_text().splitlines()]

    updates = []
    for event in events:
        # Evaluations write metrics too, without a step's time.
        if event["kind"] == "metrics" and "time/step" in event["data"]:
            updates.append(event["data"])
    timed_updates = updates[SKIPPED:-LAST]
    seconds = {}
    for part, metric in PARTS.items():
        seconds[part] = sum(update[metric] for update in timed_updates) / TIMED
    length = sum(update["train/length"] for update in timed_updates) / TIMED
    return {
        "cell": name,
        "completion_tokens": round(length),
        "measured_s": seconds,
        "cores_of_others": cores_of_others,
    }


def adopt_orphans() -> None:
    """Become the parent of processes whose parent ends first, such as servers: their CPU time is then known.

    Linux only.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans() -> None:
    """Wait up to 5 s for adopted processes to end: their CPU time is in :func:`own_s` from then on."""
    deadline = time.monotonic() + 5
    # Raised when no child is left.
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            none_has_ended = os.waitpid(-1, os.WNOHANG) == (0, 0)
            if none_has_ended:
                time.sleep(0.05)


def busy_s() -> float:
    """Seconds that this machine's cores have worked since its start."""
    import psutil

    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def own_s() -> float:
    """CPU seconds of this process and of those that it started and waited for."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def this_core() -> dict[str, Any]:
    """This machine with one thread, as a device of the plan. Its link is what FSDP over two processes reaches."""
    import torch

    from kl_comedy.planning.sizes import this_machine
    from kl_comedy.planning.timing import Assumed

    # As in the cells: a core per process.
    torch.set_num_threads(1)
    spawn: Callable[..., Any] = torch.multiprocessing.spawn
    with tempfile.TemporaryDirectory() as folder:
        spawn(time_fsdp, (folder,), nprocs=2)
        measured_rate = float(Path(folder, "rate").read_text())
    device = dataclasses.asdict(this_machine())
    # The plan multiplies a device's link by the share that it assumes to be reached, and this rate is reached.
    device["link"] = measured_rate / Assumed().link
    return device


def time_fsdp(rank: int, folder: str) -> None:
    """Write the bytes/s that each of two processes receives from the other through FSDP over gloo.

    FSDP gathers the weights of each layer for the forward pass, again for the backward pass, and reduces its gradient.
    The layers compute next to nothing, so that the time is that of the link.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    width = 1280
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(6)]
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    seconds = []
    # The fastest of twenty: other programs only slow the link down.
    for _ in range(20):
        start = time.perf_counter()
        values = torch.ones(1, width)
        for layer in layers:
            values = layer(values)
        values.sum().backward()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        # Three transfers of float32 weights; half of each is on this rank already.
        received_bytes = 3 / 2 * len(layers) * 4 * width**2
        Path(folder, "rate").write_text(str(received_bytes / min(seconds)))
    dist.destroy_process_group()


def planned(row: dict[str, Any], device: dict[str, Any]) -> dict[str, float]:
    """The seconds that the plan gives for the cell of a row, by part."""
    from kl_comedy.config import load_config
    from kl_comedy.planning.plan import Lengths, Plan
    from kl_comedy.planning.sizes import Device

    config = load_config(None, [*COMMON, *CELLS[row["cell"]]])
    lengths = Lengths(prompt=6, completion=row["completion_tokens"], longest=32)
    timing = Plan(config, Device(**device), lengths).timing
    generate = timing.generate_s
    learn = timing.learn_s + timing.publish_s
    # See PARTS: where the engines load the new weights, the run's metrics count it.
    if config.lag.mode == "async":
        generate += timing.load_s
    else:
        learn += timing.load_s
    return {"generate": generate, "learn": learn, "update": timing.update_s}


def page(result: dict[str, Any]) -> str:
    """The content of results/scaling/README.md."""
    from kl_comedy.planning.timing import Assumed

    machine = result["machine"]
    device = result["device"]
    rows = result["rows"]
    plans = [planned(row, device) for row in rows]
    others = max(row["cores_of_others"] for row in rows)
    part_titles = " | ".join(f"{part}, s | planned | to 1x1 | planned" for part in PARTS)
    lines = [
        "# Planned and measured time over ranks and engines",
        "",
        "<!-- python research/scripts/stored_tables.py scaling -->",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, one thread a process, torch {machine['versions']['torch']}; "
        f"commit {machine['commit']}. `kl-comedy train` with `hf_server` engines and a pocket policy of 11M parameters "
        f"with random weights, 256 completions of at most 32 tokens an update, {result['updates']} updates a cell. "
        f"Other programs took up to {others:.2f} cores meanwhile.",
        "",
        "    OMP_NUM_THREADS=1 python bench/scaling.py",
        "",
        "Wall seconds an update: drawing; learning, with publishing the weights and loading them into the engines (an "
        "asynchronous engine loads them while it draws); the whole. Of each part, measured and planned seconds, then "
        "both as ratios to the first row. The plan is `kl-comedy plan`'s for one core: "
        f"{device['fp32_flops'] / 1e9:.0f} GFLOP/s in float32, {device['bandwidth'] / 1e9:.1f} GB/s of memory, "
        f"{Assumed().link * device['link'] / 1e9:.2f} GB/s between ranks over gloo, measured before the cells. Ranks x "
        "engines; fsdp unless the row says otherwise.",
        "",
        f"| cell | {part_titles} |",
        "|---|" + "---:|" * 4 * len(PARTS),
    ]
    for row, plan in zip(rows, plans, strict=True):
        cells = [row["cell"]]
        for part in PARTS:
            measured = row["measured_s"][part]
            measured_ratio = measured / rows[0]["measured_s"][part]
            planned_ratio = plan[part] / plans[0][part]
            cells += [f"{measured:.2f}", f"{plan[part]:.2f}", f"{measured_ratio:.2f}", f"{planned_ratio:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="default: all")
    parser.add_argument("--page", action="store_true", help="write the page of the recorded times")
    options = parser.parse_args()
    if options.page:
        (OUT / "README.md").write_text(page(json.loads(FILE.read_text())))
        return
    adopt_orphans()
    result: dict[str, Any] = {"machine": describe(threads=1), "device": this_core(), "updates": TIMED, "rows": []}
    for name in options.cells:
        row = measure(name)
        result["rows"].append(row)
        print(row, file=sys.stderr, flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(result, indent=1) + "\n")
    (OUT / "README.md").write_text(page(result))


if __name__ == "__main__":
    main()
