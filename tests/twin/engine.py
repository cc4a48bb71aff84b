"""The engine in float64, with what each of its updates computed.

Nothing in the package asks for float64, so this is a patch for tests alone: whatever asks for float32 gets float64.
The factors that ``model.head_dtype`` rounds stay bfloat16.
"""

import contextlib
import io
import os
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console

from kl_comedy.config import load_config
from kl_comedy.models import load
from kl_comedy.registry import load_plugin_file
from kl_comedy.training import module as training_module
from kl_comedy.training import run_record
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.run import train

PARTS = Path(__file__).with_name("parts.py")
NO_TAGS = dict.fromkeys(("kl.label", "kl.regime", "kl.verdict", "kl.relative_bias", "kl.cosine"), "")
"""What a run asks of the certificate of its terms."""


class Killed(BaseException):
    """Raised in place of an update, as if the process ended there."""


@contextlib.contextmanager
def in_float64():
    """Inside, the engine's float32 is float64."""
    # Tables of torch that name both types are made before the two are one.
    torch.storage._dtype_to_storage_type_map()
    torch.storage._storage_type_to_dtype_map()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(torch, "float32", torch.float64),
            # oneDNN has no products in float64.
            mock.patch.dict(os.environ, {"KL_COMEDY_LINEAR": "torch"}),
            mock.patch.object(torch, "float", torch.float64),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
            mock.patch.dict(load.DTYPES, {"float32": torch.float64}),
            # Certificates and lists of packages take longer than the run.
            mock.patch.object(run_record, "term_tags", lambda config, terms: NO_TAGS),
            mock.patch.object(run_record, "policy_tags", lambda config: {}),
            mock.patch.object(run_record, "provenance_files", lambda *_: {}),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def whole(tensor):
    """A copy of a tensor, gathered where it is in shards."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def trained_weights(module):
    """The weights that the policy trains, and those of the value head, by name."""
    weights = {name: whole(p) for name, p in module.policy.named_parameters() if p.requires_grad}
    if module.value_head is not None:
        weights |= {f"value.{name}": whole(p) for name, p in module.value_head.named_parameters()}
    return weights


def gradients(module):
    parameters = {name: p for name, p in module.policy.named_parameters() if p.requires_grad}
    if module.value_head is not None:
        parameters |= {f"value.{name}": p for name, p in module.value_head.named_parameters()}
    return {name: whole(p if p.grad is None else p.grad) * (p.grad is not None) for name, p in parameters.items()}


def row_of(scored):
    """A completion as plain data: what the policy drew, and by rows what it read.

    ``columns``: where in the completion its own tokens stand; ``turns``: the number of the turn of each.
    """
    rollout = scored.rollout
    own = list(rollout.trained) or [True] * len(rollout.completion_ids)
    rows = [(list(rollout.prompt.token_ids), [], [])]
    starts = dict(rollout.restarts)
    for column, token in enumerate(rollout.completion_ids):
        if column in starts:
            rows.append((list(starts[column]), [], []))
        rows[-1][1].append(token)
        rows[-1][2].append(own[column])
    columns = [column for column, is_own in enumerate(own) if is_own]
    ends = rollout.turn_ends or (len(own),)

    def of_own(values):
        return [values[column] for column in columns]

    return {
        "problem": rollout.prompt.problem.id,
        "prompt_text": rollout.prompt.text,
        "answer": rollout.prompt.problem.answer,
        "prompt": list(rollout.prompt.token_ids),
        "group": rollout.group_id,
        "ids": of_own(rollout.completion_ids),
        "logps": of_own(rollout.logps),
        "versions": of_own(rollout.versions),
        "columns": columns,
        "width": len(own),
        "turns": [sum(end <= column for end in ends) for column in columns],
        "rows": rows,
        "stop_reason": rollout.stop_reason,
        "text": rollout.text,
        "reward": scored.reward.value,
        "parts": dict(scored.reward.parts),
    }


class Recorder:
    """What the updates of a run computed: one mapping for each, by the number of the update.

    Rows of an update that another process passed are not in its log-probs and advantages.
    """

    def __init__(self, kill_at=None, file=None):
        """``file``: where the updates so far are saved after each of them."""
        self.file = file
        self.updates = {}
        self.kill_at = kill_at
        self.start = None
        self.module = None
        self._current = None

    @contextlib.contextmanager
    def attached(self):
        """Inside, updates of the engine are recorded."""
        step = PolicyModule.training_step
        clip = PolicyModule._clip_gradients
        prepare = training_module.prepare
        micro_loss = training_module.micro_loss
        recorder = self

        def recorded_step(module, batch, batch_idx):
            recorder.module = module
            if module.version == recorder.kill_at:
                raise Killed
            if recorder.start is None and module.version == 0:
                recorder.start = {name: whole(p) for name, p in module.policy.named_parameters()}
            recorder._current = {
                "version": module.version,
                "rows": [row_of(row) for row in batch.rows],
                "betas": dict(module.beta_values),
                "logp": {},
                "advantage": {},
                "weight": {},
                "value_target": {},
            }
            before = trained_weights(module)
            step(module, batch, batch_idx)
            update = recorder._current
            after = trained_weights(module)
            update["before"] = before
            update["after"] = after
            update["metrics"] = dict(module.last_metrics)
            update["betas_after"] = dict(module.beta_values)
            update["references"] = {
                name: {key: whole(w) for key, w in reference.state_dict()["weights"].items()}
                for name, reference in module.moving_references.items()
            }
            recorder.updates[update["version"]] = update
            if recorder.file is not None:
                torch.save({"updates": recorder.updates, "start": recorder.start}, recorder.file)

        def recorded_prepare(rows, plan, **arguments):
            micro_batches = prepare(rows, plan, **arguments)
            for micro in micro_batches:
                if micro.empty:
                    continue
                for index, position in enumerate(micro.positions):
                    own_T = micro.experience.mask_BT[index].bool()
                    update = recorder._current
                    update["advantage"][position] = micro.experience.advantage_BT[index, own_T].tolist()
                    update["weight"][position] = float(micro.experience.weight_B[index])
                    if micro.value_target_BT is not None:
                        update["value_target"][position] = micro.value_target_BT[index, own_T].tolist()
            return micro_batches

        def recorded_loss(micro, passes, **arguments):
            if not micro.empty:
                logp_BT = passes["initial"].logp_BT.detach()
                for index, position in enumerate(micro.positions):
                    own_T = micro.experience.mask_BT[index].bool()
                    recorder._current["logp"][position] = logp_BT[index, own_T].tolist()
            return micro_loss(micro, passes, **arguments)

        def recorded_clip(module):
            recorder._current["gradient"] = gradients(module)
            norms = clip(module)
            recorder._current["clipped"] = gradients(module)
            return norms

        with (
            mock.patch.object(PolicyModule, "training_step", recorded_step),
            mock.patch.object(PolicyModule, "_clip_gradients", recorded_clip),
            mock.patch.object(training_module, "prepare", recorded_prepare),
            mock.patch.object(training_module, "micro_loss", recorded_loss),
        ):
            yield self


def run_engine(path, overrides=(), *, kill_at=None):
    """Train the config at ``path`` in float64 in this process.

    ``kill_at``: the run ends before that update, and is resumed. Returns the recorded updates and the run's folder.
    """
    load_plugin_file(PARTS)
    console = Console(file=io.StringIO(), width=200)
    overrides = [*overrides, "resume=auto"]
    updates = {}
    start = None
    if kill_at is not None:
        recorder = Recorder(kill_at)
        with in_float64(), recorder.attached(), contextlib.suppress(Killed):
            train(load_config(path, overrides), console=console, command="twin")
        updates |= recorder.updates
        start = recorder.start
    recorder = Recorder()
    with in_float64(), recorder.attached():
        outcome = train(load_config(path, overrides), console=console, command="twin")
    repeated = updates.keys() & recorder.updates.keys()
    updates |= recorder.updates
    return {
        "updates": [updates[version] for version in sorted(updates)],
        "start": start or recorder.start,
        "resumed_from": min(recorder.updates) if kill_at is not None else None,
        "repeated": sorted(repeated),
        "policy": Path(outcome.run.policy),
    }
