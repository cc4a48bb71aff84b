"""The page of results/gpu is what bench/gpu.py writes of the results beside it."""

import importlib.util
import sys
from pathlib import Path

FILE = Path(__file__).parents[2] / "bench" / "gpu.py"


def test_the_page_says_what_the_files_beside_it_say():
    spec = importlib.util.spec_from_file_location("bench_gpu", FILE)
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench  # its dataclasses look it up
    spec.loader.exec_module(bench)
    assert (bench.OUT / "README.md").read_text() == bench.page(bench.OUT), "run python bench/gpu.py --page"
