"""Operations that torch documents as raising, or as made deterministic at a price, on a GPU under determinism.

The documentation of ``torch.use_deterministic_algorithms`` is the list. The tables below say where the package uses an
operation of it, and why it may; another use fails here, on a machine without a GPU.
"""

import ast
import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kl_comedy import cuda
from kl_comedy.config import load_config
from kl_comedy.training.experience_module import ExperienceModule
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run import train
from operations import Operations

ROOT = Path(__file__).parents[1] / "src" / "kl_comedy"
TINY = Path(__file__).parent / "support" / "tiny.yaml"
TRAINED = ("cuda.py", "kl", "objective", "models", "rollouts", "training", "evaluation", "lab/audit")
"""What runs on the device of the policy during a run. The oracle and the making of the pocket policy are on the CPU."""
ON_THE_CPU = ("kl/oracle/", "models/pocket.py")

RAISING = {
    ("cuda.py", "cumsum"): "on the CPU, and of integers",
    ("models/attention.py", "cumsum"): "of integers",
    ("models/logprobs.py", "cumsum"): "of integers",
    ("objective/groups.py", "bincount"): "without weights",
    ("rollouts/engines/pool.py", "put"): "a queue's",
    ("rollouts/engines/transports.py", "put"): "a queue's",
}
MADE_DETERMINISTIC = {
    ("models/head.py", "gather"): "without gradient",
    ("models/head.py", "scatter_add"): "one place of each row",
    ("models/load.py", "gather"): "without gradient",
    ("objective/groups.py", "index_add"): "rows of an update",
    ("objective/preferences.py", "index_add"): "rows of an update",
    ("rollouts/decoding.py", "gather"): "without gradient",
    ("rollouts/decoding.py", "index_copy"): "without gradient",
    ("rollouts/decoding.py", "index_select"): "without gradient",
    ("rollouts/decoding.py", "scatter"): "without gradient",
    ("rollouts/engines/weights.py", "gather"): "without gradient",
    ("training/distributed.py", "gather"): "of objects",
}
UNDOCUMENTED = {"cross_entropy", "CrossEntropyLoss", "kthvalue"}
"""Raise as well: the first two are NLLLoss; kthvalue by torch's own tests."""


def documented():
    """Names in the two lists, made deterministic and raising, as attributes: classes as functions too."""
    made, _, raising = torch.use_deterministic_algorithms.__doc__.partition("operations will throw a")
    parts = []
    for part in (made, raising):
        names = {name.rpartition(".")[2] for name in re.findall(r"\* :(?:class|func):`torch\.([\w.]+)`", part)}
        functions = {re.sub(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower() for name in names}
        parts.append({name.rstrip("_") for name in names | functions})
    made, raising = parts
    return made - raising, raising | UNDOCUMENTED


def uses(names):
    """``(file, name)`` of every attribute in ``names``, in place (``_``) or not; ranks gather something else."""
    operations = set()
    for file in sorted(ROOT.rglob("*.py")):
        path = str(file.relative_to(ROOT))
        if not path.startswith(TRAINED) or path.startswith(ON_THE_CPU):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.rstrip("_") in names:
                owner = ast.unparse(node.value)
                if not owner.endswith(("ranks", "prompts", "completions", "_rows")):
                    operations.add((path, node.attr.rstrip("_")))
    return operations


def test_the_documentation_is_read():
    made, raising = documented()
    assert {"cumsum", "histc", "put", "nll_loss", "embedding_bag", "bincount", "median", "interpolate"} <= raising
    assert {"index_add", "scatter_add", "gather", "index_copy", "repeat_interleave"} <= made


def test_every_use_of_a_listed_operation_is_known():
    made, raising = documented()
    assert uses(raising) == set(RAISING)
    assert uses(made) == set(MADE_DETERMINISTIC)


@pytest.mark.parametrize(
    "words",
    [
        ["kl=[{estimator: k1, placement: reward, correction: prefix, credit: to_go, beta: 0.05}]"],
        [
            "kl=[{estimator: k1, placement: reward, beta: 0.02, baseline: own, correction: prefix_previous}, "
            "{estimator: exact, placement: loss, beta: 0.02, reference: ema}]",
            "train.precision=bf16",
            "model.gradient_checkpointing=true",
            "algorithm.advantage=gae",
        ],
    ],
    ids=["float32", "bf16"],
)
def test_an_update_runs_no_operation_that_raises(tmp_path, monkeypatch, words):
    """Two updates of the tiny policy by the branches for a GPU: forward, backward, optimizer, sampling, metrics."""
    settings = ["train.steps=2", "train.eval_every=0", "train.checkpoint_every=0", "train.samples_every=0"]
    settings += ["eval.at_start=false", "eval.at_end=false", "lag.mode=replayed", "lag.steps=1", f"output={tmp_path}"]
    config, console, publish = load_config(TINY, settings + words), Console(file=io.StringIO()), PolicyModule._publish

    def without_gradients(module, measured):
        assert all(p.grad is None for p in module.parameters()), "the sampler gets their memory"
        return publish(module, measured)

    monkeypatch.setattr(PolicyModule, "_publish", without_gradients)
    cpu = train(config, console=console, command="").summary["metrics"]
    monkeypatch.setattr(cuda, "on_gpu", lambda tensor: True)
    operations = Operations()

    def recorded(function):
        def run(*args, **options):
            with operations:
                return function(*args, **options)

        return run

    monkeypatch.setattr(PolicyModule, "training_step", recorded(PolicyModule.training_step))
    monkeypatch.setattr(ExperienceModule, "_generate", recorded(ExperienceModule._generate))
    gpu = train(config, console=console, command="").summary["metrics"]
    assert {"log_softmax", "_fused_adamw_"} & {name for name, _ in operations.names}
    raising = documented()[1] - {"cumsum", "bincount"}
    assert {name for name, _ in operations.names if name.split(".")[0].rstrip("_") in raising} == set()
    assert {dtype for name, dtype in operations.names if name == "cumsum" and dtype.is_floating_point} == set()
    ours, theirs = ({name: x for name, x in each.items() if not name.startswith("time/")} for each in (gpu, cpu))
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
