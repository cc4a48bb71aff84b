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
# What runs on the device of the policy during a run. The oracle and the making of the pocket policy are on the CPU.
TRAINED = ("cuda.py", "kl", "objective", "models", "rollouts", "training", "evaluation", "audit")
ON_THE_CPU = ("kl/oracle/", "models/pocket.py")

RAISING = {
    ("cuda.py", "cumsum"): "on the CPU, and of integers",
    ("models/attention.py", "cumsum"): "of integers",
    ("models/logprobs.py", "cumsum"): "of integers",
    ("objective/advantages.py", "cumsum"): "of integers",
    ("training/loss.py", "cumsum"): "of integers",
    ("objective/groups.py", "bincount"): "without weights",
    ("rollouts/engines/pool.py", "put"): "a queue's",
    ("rollouts/engines/transports.py", "put"): "a queue's",
}
MADE_DETERMINISTIC = {
    ("kl/corrections.py", "gather"): "one place of each token",
    ("kl/corrections.py", "scatter"): "one place of each token",
    ("models/head.py", "gather"): "without gradient",
    ("models/head.py", "repeat_interleave"): "without gradient",
    ("models/head.py", "scatter_add"): "one place of each row",
    ("models/load.py", "gather"): "without gradient",
    ("objective/advantages.py", "gather"): "without gradient",
    ("objective/groups.py", "index_add"): "rows of an update",
    ("objective/preferences.py", "index_add"): "rows of an update",
    ("rollouts/decoding.py", "gather"): "without gradient",
    ("rollouts/decoding.py", "index_copy"): "without gradient",
    ("rollouts/decoding.py", "index_select"): "without gradient",
    ("rollouts/decoding.py", "scatter"): "without gradient",
    ("rollouts/engines/weights.py", "gather"): "without gradient",
    ("training/distributed.py", "gather"): "of objects",
}
# They raise as well: the first two are NLLLoss; kthvalue by torch's own tests.
UNDOCUMENTED = {"cross_entropy", "CrossEntropyLoss", "kthvalue"}


def documented():
    """Names in the two lists, made deterministic and raising, as attributes: classes as functions too."""
    made_text, _, raising_text = torch.use_deterministic_algorithms.__doc__.partition("operations will throw a")
    made = names_in(made_text)
    raising = names_in(raising_text)
    return made - raising, raising | UNDOCUMENTED


def names_in(text):
    """The operations that a part of the documentation lists; of classes, their functions too (NLLLoss, nll_loss)."""
    names = set()
    for dotted in re.findall(r"\* :(?:class|func):`torch\.([\w.]+)`", text):
        name = dotted.rpartition(".")[2]
        function = re.sub(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
        names.add(name.rstrip("_"))
        names.add(function.rstrip("_"))
    return names


# Methods of the same names on objects that are no tensors: ranks gather objects, rows of a batch gather tokens.
OTHER_OWNERS = ("ranks", "prompts", "completions", "_rows")


def uses(names):
    """``(file, name)`` of every attribute in ``names``, in place (``_``) or not."""
    operations = set()
    for file in sorted(ROOT.rglob("*.py")):
        path = str(file.relative_to(ROOT))
        if not path.startswith(TRAINED) or path.startswith(ON_THE_CPU):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            name = node.attr.rstrip("_")
            if name in names and not ast.unparse(node.value).endswith(OTHER_OWNERS):
                operations.add((path, name))
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
    settings = [
        "train.steps=2",
        "train.eval_every=0",
        "train.checkpoint_every=0",
        "train.samples_every=0",
        "eval.at_start=false",
        "eval.at_end=false",
        "lag.mode=replayed",
        "lag.steps=1",
        f"output={tmp_path}",
    ]
    config = load_config(TINY, settings + words)
    console = Console(file=io.StringIO())
    publish = PolicyModule._publish

    def without_gradients(module, measured):
        with_gradient = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
        assert with_gradient == [], "the sampler gets their memory"
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
    recorded_names = {name for name, _ in operations.names}
    assert {"log_softmax", "_fused_adamw_"} & recorded_names, "nothing was recorded"
    # Both are allowed of integers: cumsum is asked for its dtypes below, bincount raises with weights only.
    _, documented_as_raising = documented()
    raising = documented_as_raising - {"cumsum", "bincount"}
    assert {name for name in recorded_names if name.split(".")[0].rstrip("_") in raising} == set()
    dtypes_of_cumsum = {dtype for name, dtype in operations.names if name == "cumsum"}
    assert {dtype for dtype in dtypes_of_cumsum if dtype.is_floating_point} == set()
    assert without_times(gpu) == pytest.approx(without_times(cpu), rel=1e-3, abs=1e-4)


def without_times(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}
