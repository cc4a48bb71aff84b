"""Real vLLM. Every test here is skipped, with the reason, where vLLM cannot be imported."""

import importlib.util
import os

import pytest

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # else the sampler's first call waits for a C++ compiler
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

REASON = "vLLM is not installed in this environment (make setup-vllm, then .venv-vllm/bin/python -m pytest -m vllm)"


def pytest_collection_modifyitems(items):
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.vllm)
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason=REASON))
