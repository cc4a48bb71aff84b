"""Imports point one way, and the light rooms stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "kl_comedy"
LAYERS = {
    **dict.fromkeys(["errors", "registry", "records", "io", "processes", "config"], 0),
    **dict.fromkeys(["kl", "objective", "statistics"], 1),
    **dict.fromkeys(["models", "rewards", "data", "rollouts", "tracking"], 2),
    **dict.fromkeys(["evaluation", "training", "slurm", "lab"], 3),
    "cli": 4,
}
SAME_LAYER = {
    ("config", "errors"),
    ("config", "registry"),
    ("config", "records"),
    ("registry", "errors"),
    ("io", "errors"),
    ("processes", "errors"),
    ("processes", "io"),
    ("config", "io"),
    ("kl", "objective"),  # the oracle puts the algorithm around the terms
    ("models", "data"),  # the pocket policy is warm-started on demonstrations of its own problems
    ("rollouts", "models"),  # the sampler runs the policy with the models' own attention
    ("training", "evaluation"),  # a run evaluates between updates
    ("lab", "training"),  # audits train and load policies
    ("training", "lab"),  # the audit callback
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST, *, top_level_only: bool) -> set[str]:
    nodes = tree.body if top_level_only else ast.walk(tree)
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("kl_comedy.")}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_lower_layers_only(path):
    room = room_of(path)
    if room == "__init__":
        return
    for other in imported_rooms(ast.parse(path.read_text()), top_level_only=False) - {room}:
        assert other in LAYERS, f"{path}: unknown room {other}"
        allowed = LAYERS[other] < LAYERS[room] or (room, other) in SAME_LAYER
        assert allowed, f"{path} (layer {LAYERS[room]}) imports {other} (layer {LAYERS[other]})"


def test_every_room_has_a_layer():
    rooms = {room_of(path) for path in ROOT.rglob("*.py")} - {"__init__", "__main__"}
    assert rooms <= set(LAYERS)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("kl_comedy.kl", ["transformers", "lightning", "mlflow", "vllm", "datasets", "pandas"]),
        ("kl_comedy.lab.peers", ["transformers", "lightning", "mlflow", "vllm", "pandas", "omegaconf"]),
        ("kl_comedy.objective", ["transformers", "lightning", "mlflow", "vllm"]),
        ("kl_comedy.cli.main", ["torch", "transformers", "lightning", "mlflow", "pandas"]),
        ("kl_comedy.config", ["torch", "transformers", "lightning", "mlflow"]),
        ("kl_comedy.data", ["datasets", "reasoning_gym", "transformers"]),
        ("kl_comedy.rewards", ["math_verify", "reasoning_gym", "transformers"]),
        ("kl_comedy.statistics", ["mlflow", "pandas", "scipy", "numpy", "torch"]),
        ("kl_comedy.tracking", ["mlflow", "pandas", "matplotlib", "torch"]),
    ],
)
def test_importing_a_room_is_light(module, heavy):
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
