"""Draws configs and compares the engine with its slow twin; `make twin COUNT=1000 SEED=0`.

`python -m tests.twin cover` prints seeds that cover everything in the registries, for the default tests.
"""

import argparse
import logging
import sys
import time

from tests.twin.draw import covered, draw, needed

CANDIDATES = 1000


def cover(count):
    """Seeds among the first ones that cover all that is needed, greedily, and again until there are ``count``."""
    by_seed = {}
    for seed in range(CANDIDATES):
        mapping, kill_at, _ = draw(seed)
        by_seed[seed] = covered(mapping, kill_at)
    chosen = []
    missing = needed()
    while missing or len(chosen) < count:
        seed = max(by_seed, key=lambda candidate: len(by_seed[candidate] & missing))
        if not by_seed[seed] & missing:
            if len(chosen) < count and missing != needed():
                missing = needed()
                continue
            sys.exit(f"no draw has {sorted(missing)}: the draws do not know it")
        missing -= by_seed.pop(seed)
        chosen.append(seed)
        if not missing and len(chosen) < count:
            missing = needed()
    print(sorted(chosen))


def run(first, count):
    """Compare ``count`` configs from seed ``first`` on; the number of those that differ."""
    from tests.twin.compare import compare
    from tests.twin.shrink import report

    start = time.monotonic()
    refused = 0
    failures = 0
    for done, seed in enumerate(range(first, first + count), start=1):
        mapping, kill_at, before = draw(seed)
        refused += before
        difference = compare(mapping, kill_at=kill_at)
        if difference is not None:
            failures += 1
            print(f"\nseed {seed}: {report(mapping, kill_at, difference)}", flush=True)
        left = (time.monotonic() - start) / done * (count - done)
        line = f"{done} of {count} configs, {failures} differ, {refused} draws refused, {left / 60:.0f} min left"
        print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)
    print()
    return failures


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.twin", description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("run", "cover"))
    parser.add_argument("--count", type=int, default=1000, help="configs (run), default tests (cover)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.command == "cover":
        cover(arguments.count)
    else:
        sys.exit(min(run(arguments.seed, arguments.count), 1))


if __name__ == "__main__":
    main()
