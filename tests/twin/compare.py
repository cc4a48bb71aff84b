"""A config trained by the engine and by its slow twin, and the first quantity in which they differ."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from tests.twin.engine import in_float64, run_engine
from tests.twin.update import one_update, start_twin

from kl_comedy.config import load_config
from kl_comedy.data import load_problems
from kl_comedy.kl import resolve_terms
from kl_comedy.models.pocket import VOCABULARY

TOLERANCE = 1e-6
"""Of a quantity's own norm; of the change of a tensor in an update that of the change."""
ROUNDING = 1e-9
"""What sums in another order may leave of a quantity that is 0, beside the largest of its kind."""

STEP_OF_ROUNDING = 1e-9
WHITENED_ROUNDING = 1e-9


@dataclass(frozen=True)
class Difference:
    """The first quantity in which the engine and its twin differ."""

    update: int
    quantity: str
    engine: object
    twin: object

    def __str__(self):
        return f"update {self.update}: {self.quantity}\n  engine: {self.engine}\n  twin:   {self.twin}"


def engine_quantities(update):
    """An update as the engine recorded it, under the names of the twin."""
    rows = update["rows"]
    metrics = update["metrics"]
    quantities = {
        "prompts": [row["prompt"] for row in rows],
        "groups": [row["group"] for row in rows],
        "versions": [row["versions"] for row in rows],
        "tokens": [row["ids"] for row in rows],
        "log-probs of the sampler": [row["logps"] for row in rows],
        "ends": [row["stop_reason"] for row in rows],
        "texts": [row["text"] for row in rows],
        "rewards": [row["reward"] for row in rows],
        "log-probs of the policy": by_row(update["logp"], rows),
        "targets of the critic": by_row(update["value_target"], rows),
        "advantages": by_row(update["advantage"], rows),
        "shares of the completions": by_row(update["weight"], rows),
        "learning rate": metrics["train/lr"],
        "gradient norm": metrics["grad/norm"],
        "gradient norm of the value head": metrics.get("grad/value_norm"),
        "coefficients": list(update["betas_after"].values()),
    }
    for name, value in metrics.items():
        if name.startswith("train/loss_"):
            quantities[f"loss of {name.removeprefix('train/loss_')}"] = value
    for name, gradient in update["gradient"].items():
        quantities[f"gradient of {name}"] = gradient
        quantities[f"update of {name}"] = update["after"][name] - update["before"][name]
    for reference, weights in update["references"].items():
        for name, weight in weights.items():
            quantities[f"reference {reference}: {name}"] = weight
    return quantities


def by_row(values, rows):
    return [values.get(position) for position in range(len(rows))]


def as_vector(value):
    """A number, a tensor, or nested lists of numbers as one vector; None where something is missing."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten()
    if isinstance(value, list):
        parts = [as_vector(part) for part in value]
        if any(part is None for part in parts):
            return None
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
    if value is None:
        return None
    return torch.tensor([float(value)], dtype=torch.float64)


def scale_of(name, sizes):
    """The largest norm among the quantities of the same kind."""
    kind = name.split(" of ")[0].split(":")[0]
    return max(size for other, size in sizes.items() if other.split(" of ")[0].split(":")[0] == kind)


def differs(name, engine, twin, scale):
    if name in ("ends", "texts"):
        return engine != twin
    engine = as_vector(engine)
    twin = as_vector(twin)
    if engine is None or twin is None or engine.shape != twin.shape:
        return True
    gap = float((engine - twin).norm())
    if name.startswith("update of"):
        # Where there is no signal, AdamW divides rounding by its epsilon.
        return not gap <= TOLERANCE * float(twin.norm()) + STEP_OF_ROUNDING
    if name == "advantages":
        # Equal values, whitened: rounding divided by the epsilon of their deviation.
        return not gap <= TOLERANCE * float(twin.norm()) + WHITENED_ROUNDING
    return not gap <= TOLERANCE * float(twin.norm()) + ROUNDING * max(scale, 1e-3)


def first_difference(engine, twin, step):
    """The first of the twin's quantities, in the order in which they are computed, that the engine has not."""
    sizes = {}
    for name, value in twin.items():
        vector = None if name in ("ends", "texts") else as_vector(value)
        sizes[name] = 0.0 if vector is None else float(vector.norm())
    for name, value in twin.items():
        other = engine.get(name)
        if differs(name, other, value, scale_of(name, sizes)):
            return Difference(step, name, short(other), short(value))
    return None


def short(value):
    """Enough of a value to see what is wrong."""
    if isinstance(value, torch.Tensor):
        return [round(number, 12) for number in value.detach().flatten()[:8].tolist()]
    return value


def prompts_of(config):
    """The token ids of the training prompts, in order: a token a character."""
    problems = load_problems(config.data.train, key="data.train", training=True, allow_test_split=False)
    return [[VOCABULARY.index(letter) for letter in problem.text] for problem in problems]


def compare(mapping, *, kill_at=None):
    """The first difference between engine and twin in training the config ``mapping``; None without any.

    Raises :class:`~kl_comedy.errors.UserError` where the config is refused.
    """
    with tempfile.TemporaryDirectory(prefix="twin-run-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(mapping | {"output": str(Path(folder) / "runs")}))
        trained = run_engine(path, kill_at=kill_at)
        policy = load_file(trained["policy"] / "model.safetensors")
        config = load_config(path)
    return difference_of(config, trained, policy)


def difference_of(config, trained, policy):
    """The first difference of a trained run: its updates, then the exported ``policy``."""
    if len(trained["updates"]) != config.train.steps:
        return Difference(len(trained["updates"]), "number of updates", len(trained["updates"]), config.train.steps)
    with in_float64():
        twin = start_twin(config, resolve_terms(config.kl), trained["start"])
        prompts = prompts_of(config)
        for step, update in enumerate(trained["updates"]):
            quantities = one_update(twin, step, update["rows"], prompts)
            difference = first_difference(engine_quantities(update), quantities, step)
            if difference is not None:
                return difference
        expected = twin.policy(twin.trained).merged()
        return first_difference(
            {f"exported {name}": tensor for name, tensor in policy.items()},
            {f"exported {name}": tensor for name, tensor in expected.items()},
            config.train.steps,
        )
