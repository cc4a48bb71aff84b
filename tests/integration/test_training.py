"""Training end to end on the tiny pocket policy: what a run does, resumes, refuses and leaves behind."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kl_comedy.config import load_config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.io import sha256_file
from kl_comedy.models import weights_hash
from kl_comedy.registry import load_plugin_file
from kl_comedy.training.run import make_trainer, train

TINY = Path(__file__).with_name("tiny.yaml")
ROOT = Path(__file__).parents[2]
LEVELS = ("token", "sequence")
EXACT = ("exact_reverse", "exact_forward", "total_variation")
SAMPLED = ("k1_reverse", "k2_reverse", "k3_reverse")
SETUPS = {
    "all_state": [
        "lag.mode=replayed",
        "lag.steps=4",
        "algorithm.updates_per_batch=2",
        "kl.0.reference=ema",
        "kl.0.estimator=exact",
        "kl.0.placement=loss",
        "kl.0.beta={target: 0.5}",
        "optimizer.schedule=cosine",
        "optimizer.warmup_steps=2",
    ],
    "on_policy": [],
    "several_updates": ["algorithm.updates_per_batch=2", "algorithm.epochs_per_batch=2"],
    "replayed": ["lag.mode=replayed", "lag.steps=2", "kl.0.correction=prefix"],
    "replayed_in_parts": ["lag.mode=replayed", "lag.steps=4", "algorithm.updates_per_batch=2"],
    "moving_reference": ["kl.0.reference=ema", "kl.0.estimator=exact", "kl.0.placement=loss"],
    "target": ["kl.0.beta={target: 0.5}", "optimizer.schedule=cosine", "optimizer.warmup_steps=2"],
}


def quiet():
    return Console(file=io.StringIO(), width=200)


def go(tmp_path, *overrides):
    config = load_config(TINY, [f"output={tmp_path}", *overrides])
    return train(config, console=quiet(), command="kl-comedy train tiny.yaml")


def metrics_of(run):
    found = {}
    for line in (run.path / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") == "metrics":
            for name, value in event["data"].items():
                if not name.startswith("time/"):
                    key = (event["step"], name)
                    assert key not in found, f"{key} logged twice"
                    found[key] = value
    return found


def weights_of(run):
    from safetensors.torch import load_file

    return weights_hash(load_file(run.policy / "model.safetensors"))


def killed_then_resumed(tmp_path, overrides, *, at):
    """Train in a process of its own, kill -9 it once the checkpoint of update ``at`` is there, and resume."""
    command = [sys.executable, "-c", "from kl_comedy.cli.main import run; run()", "train", str(TINY)]
    command += [f"output={tmp_path}", "resume=auto", *overrides]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path)
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob(f"tiny-*/checkpoints/step-{at:08d}.ckpt")):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert not list(tmp_path.glob("tiny-*/summary.json")), "the run ended before it was killed"
    return go(tmp_path, "resume=auto", *overrides)


@pytest.mark.slow
def test_ctrl_c_prints_the_resume_command(tmp_path):
    command = [sys.executable, "-c", "from kl_comedy.cli.main import run; run()", "train", str(TINY)]
    command += [f"output={tmp_path}", "train.steps=5000", "train.eval_every=0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("tiny-*/checkpoints/step-*.ckpt")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "interrupted at update" in said and "resume=auto" in said and "Traceback" not in said
    (summary,) = tmp_path.glob("tiny-*/summary.json")
    assert json.loads(summary.read_text())["status"] == "KILLED"


@pytest.mark.parametrize(
    "setup", [name if name == "all_state" else pytest.param(name, marks=pytest.mark.slow) for name in SETUPS]
)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, setup):
    overrides = SETUPS[setup]
    whole = go(tmp_path / "whole", *overrides)
    (tmp_path / "killed").mkdir()
    resumed = killed_then_resumed(tmp_path / "killed", overrides, at=3)
    assert resumed.summary["status"] == "FINISHED"
    assert weights_of(resumed.run) == weights_of(whole.run)
    assert metrics_of(resumed.run) == metrics_of(whole.run)


def test_the_first_update_sees_zero_kl_and_the_samplers_log_probs(tmp_path):
    first = {name: value for (step, name), value in metrics_of(go(tmp_path, "train.steps=1").run).items() if step == 1}
    for name in (*SAMPLED, *EXACT):
        assert first[f"kl/{name}_token"] == 0.0 and first[f"kl/{name}_sequence"] == 0.0, name
    errors = {name: value for name, value in first.items() if name.startswith("kl_error/")}
    assert len(errors) == 12 and set(errors.values()) == {0.0}
    assert first["policy/behaviour_gap_max"] < 1e-4
    assert first["policy/staleness"] == 0.0
    assert first["policy/ess"] == pytest.approx(1.0, abs=1e-3)


def test_evaluation_measures_from_zero_and_without_estimates_where_it_is_greedy(tmp_path):
    settings = ["train.steps=4", "train.exact_kl_every=0"]
    sampled = metrics_of(go(tmp_path / "sampled", *settings).run)
    greedy = metrics_of(go(tmp_path / "greedy", *settings, "eval.temperature=0").run)
    off = metrics_of(go(tmp_path / "off", *settings, "eval.kl=false").run)
    exact = {f"kl/{n}_{level}" for n in EXACT for level in LEVELS}
    estimated = {f"kl/{n}_{level}" for n in SAMPLED for level in LEVELS} | {"kl/log_ratio_max"}
    missed = {f"kl_error/{n}_{level}{s}" for n in SAMPLED for level in LEVELS for s in ("", "_rms")}
    entropy = {"policy/entropy", "policy/entropy_sequence"}

    def measured(logged, step):
        start = "eval/heldout/"
        found = {name.removeprefix(start): v for (n, name), v in logged.items() if n == step and name.startswith(start)}
        return {name: value for name, value in found.items() if "/" in name}

    assert set(measured(sampled, 0)) == exact | estimated | missed | entropy
    assert {name for name, value in measured(sampled, 0).items() if value != 0} == entropy
    assert all(measured(sampled, 4)[name] > 0 for name in exact | entropy)
    assert set(measured(greedy, 4)) == exact | entropy
    assert measured(off, 4) == {}
    assert {k: v for k, v in sampled.items() if not k[1].startswith("eval/")} == {
        k: v for k, v in off.items() if not k[1].startswith("eval/")
    }, "measuring changes nothing of the training"


def test_staleness_is_what_was_asked_for(tmp_path):
    logged = metrics_of(go(tmp_path, "lag.mode=replayed", "lag.steps=3").run)
    assert [logged[(step, "policy/staleness")] for step in range(1, 9)] == [0, 1, 2, 3, 3, 3, 3, 3]


def test_a_batch_used_for_several_updates_is_as_old_as_asked_at_its_first_use(tmp_path):
    """Two updates a batch and a lag of four: 4 updates old at the first, 5 at the second."""
    parts = ("algorithm.updates_per_batch=2", "lag.mode=replayed", "lag.steps=4", "train.eval_every=0")
    logged = metrics_of(go(tmp_path, *parts).run)
    assert [logged[(step, "policy/staleness")] for step in range(1, 9)] == [0, 1, 2, 3, 4, 5, 4, 5]


def test_micro_batches_do_not_change_the_run(tmp_path):
    """The same updates whatever the token budget, up to float32 rounding."""
    whole = metrics_of(go(tmp_path / "a", "train.steps=2", "train.microbatch_tokens=100000").run)
    cut = metrics_of(go(tmp_path / "b", "train.steps=2", "train.microbatch_tokens=64").run)
    for key in (
        (1, "train/loss"),
        (1, "grad/norm"),
        (1, "policy/entropy"),
        (2, "kl/exact_reverse_sequence"),
        (2, "kl/total_variation_token"),
        (2, "kl_error/k1_reverse_token_rms"),
        (2, "kl_error/k2_reverse_sequence_rms"),
    ):
        assert cut[key] == pytest.approx(whole[key], rel=2e-3, abs=1e-6), key


def test_a_terms_own_baseline_does_not_depend_on_the_packing(tmp_path):
    """It is a mean over the group, and a group may be spread over micro-batches."""
    stale = ("lag.mode=replayed", "lag.steps=2", "train.steps=4", "train.eval_every=0", "kl=rb/robust", "kl.beta=0.3")
    whole = metrics_of(go(tmp_path / "a", *stale, "train.microbatch_tokens=100000").run)
    cut = metrics_of(go(tmp_path / "b", *stale, "train.microbatch_tokens=64").run)
    for key in ((3, "train/loss_kl_0"), (3, "grad/norm"), (4, "train/loss_kl_0"), (4, "kl/exact_reverse_sequence")):
        assert cut[key] == pytest.approx(whole[key], rel=5e-3, abs=1e-6), key
    assert whole[(4, "train/loss_kl_0")] != 0.0


def test_a_group_of_one_has_no_own_baseline(tmp_path):
    with pytest.raises(UserError, match=r"kl.0.baseline: got 'own'"):
        go(tmp_path, "kl=rb/robust", "rollout.group_size=1", "algorithm.advantage=none")


def test_cost_before_after_and_with_its_own_baseline_train_differently(tmp_path):
    trained = [
        weights_of(go(tmp_path / name, f"kl.0.baseline={name}", "kl.0.beta=0.5").run)
        for name in ("before", "after", "own")
    ]
    assert len({str(weights) for weights in trained}) == 3


@pytest.mark.parametrize(
    "kl",
    [
        "[]",
        *(
            pytest.param(kl, marks=pytest.mark.slow)
            for kl in (
                "{recipe: comedy/k3_both, beta: 0.1}",
                "rb/full",
                "rb/per_decision",
                "openrlhf/unbiased",
                "trl/rloo",
            )
        ),
    ],
)
def test_recipes_train(tmp_path, kl):
    assert go(tmp_path, f"kl={kl}", "train.steps=2", "train.eval_every=0").summary["status"] == "FINISHED"


@pytest.mark.parametrize(
    "algorithm",
    [
        ["algorithm.advantage=grpo", "algorithm.policy_loss=ppo_clip", "algorithm.updates_per_batch=2"],
        ["algorithm.advantage=batch_mean", "train.precision=bf16"],
        *(
            pytest.param(overrides, marks=pytest.mark.slow)
            for overrides in (
                ["algorithm.advantage=dr_grpo", "algorithm.reduction=sequence_sum", "algorithm.reduction_constant=24"],
                ["algorithm.advantage=reinforce_pp", "algorithm.reduction=sequence_mean_token_mean"],
                ["algorithm.advantage=reinforce_pp_baseline", "algorithm.mask_truncated=true"],
                ["model.lora={rank: 4}", "kl.0.estimator=exact"],
            )
        ),
    ],
    ids=lambda overrides: overrides[0].split("=")[1] + overrides[-1],
)
def test_algorithms_train(tmp_path, algorithm):
    done = go(tmp_path, *algorithm, "train.steps=4", "train.eval_every=0")
    logged = metrics_of(done.run)
    assert logged[(1, "kl/exact_reverse_token")] == 0.0
    assert logged[(4, "grad/norm")] > 0


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = go(tmp_path, "train.steps=1", "resume=auto")
    assert go(tmp_path, "train.steps=1", "resume=auto").already_finished
    assert go(tmp_path, "train.steps=1").run.path != first.run.path


def test_another_reference_is_refused_on_resume(tmp_path, monkeypatch):
    config = load_config(TINY, [f"output={tmp_path}", "resume=auto"])
    from kl_comedy.training import callbacks

    class Enough(Exception):
        pass

    original = callbacks.CheckpointCallback.save

    def stop_after_two(self, trainer, version):
        original(self, trainer, version)
        if version == 2:
            raise Enough

    monkeypatch.setattr(callbacks.CheckpointCallback, "save", stop_after_two)
    with pytest.raises(Enough):
        train(config, console=quiet(), command="x")
    monkeypatch.undo()
    from kl_comedy.training import distributed as divided

    load = divided.load_model

    def nudged(model_config):
        loaded = load(model_config)
        with torch.no_grad():
            next(iter(loaded.model.parameters())).add_(1e-3)
        return loaded

    monkeypatch.setattr(divided, "load_model", nudged)
    with pytest.raises(RunFailed, match="reference is not the one this run began with"):
        train(config, console=quiet(), command="x")


def test_nan_stops_the_run_marks_it_failed_and_keeps_the_batch(tmp_path):
    with pytest.raises(RunFailed, match=r"finite.*the last batch is kept in"):
        go(tmp_path, "optimizer.lr=1e30", "optimizer.clip_norm=null", "train.eval_every=0")
    (folder,) = tmp_path.glob("tiny-*")
    summary = json.loads((folder / "summary.json").read_text())
    kept = json.loads((folder / "failed_batch.json").read_text())
    assert summary["status"] == "FAILED" and "finite" in summary["reason"]
    assert len(kept["rows"]) == 16 and "completion_ids" in kept["rows"][0]


def test_a_loss_that_is_not_finite_stops_before_the_optimizer(tmp_path):
    """A log-ratio beyond exp's range overflows k3; the update is refused, not applied."""
    with pytest.raises(RunFailed, match=r"update 0: .*(is inf|is nan|not finite)"):
        go(tmp_path, "kl=[{estimator: k3, placement: loss, beta: 1e308}]", "train.eval_every=0")


def test_a_run_folder_has_one_holder(tmp_path):
    from kl_comedy.training.run_folder import create_run

    run = create_run(load_config(TINY, [f"output={tmp_path}"]))
    with run.held(), pytest.raises(UserError, match="is being trained by process"), run.held():
        pass


def test_a_mistake_leaves_no_folder_behind(tmp_path):
    with pytest.raises(UserError, match="did you mean 'train'"):
        go(tmp_path, "data.train.split=trian")
    assert not list(tmp_path.iterdir())


def test_characters_the_policy_cannot_spell_are_one_clear_error(tmp_path):
    with pytest.raises(UserError, match=r"data\.prompt: the model's tokenizer cannot spell"):
        go(tmp_path, "data.prompt.suffix=hello")


def test_checkpoints_load_without_pickle(tmp_path):
    run = go(tmp_path, "train.steps=2", "lag.mode=replayed", "lag.steps=1").run
    state = torch.load(run.checkpoint / "state.pt", weights_only=True)
    assert state["kl_comedy"]["version"] == 2


def test_learning_really_happens(tmp_path):
    """Forty updates raise the sampled reward on the training problems well beyond its noise."""
    done = go(
        tmp_path,
        "train.steps=40",
        "rollout.prompts_per_batch=16",
        "rollout.group_size=8",
        "optimizer.lr=2e-3",
        "kl.0.beta=0.01",
        "train.eval_every=0",
        "train.checkpoint_every=0",
    )
    reward = [value for (_, name), value in sorted(metrics_of(done.run).items()) if name == "train/reward"]
    assert sum(reward[-8:]) / 8 > sum(reward[:8]) / 8 + 0.1


def test_the_threads_of_a_run_are_its_own(tmp_path):
    """What runs in the same process afterwards computes with as many as before, so to the same bits."""
    before = torch.get_num_threads()
    go(tmp_path, f"train.threads={before + 1}", "train.steps=1")
    assert torch.get_num_threads() == before


CALLBACK = """
import torch
from kl_comedy.registry import CALLBACKS
from lightning.pytorch.callbacks import Callback

@CALLBACKS.register("gradient_norms", source="test")
class GradientNorms(Callback):
    \"\"\"Append the norm of the gradient that the optimizer gets.\"\"\"

    def __init__(self, path, every=1):
        self.path, self.every = path, every

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if pl_module.version % self.every == 0:
            norm = torch.cat([p.grad.flatten() for p in pl_module.policy.parameters()]).norm()
            with open(self.path, "a") as file:
                file.write(f"{float(norm)}\\n")
"""


@pytest.fixture(scope="module")
def gradient_norms(tmp_path_factory):
    """A callback that a user's plugin file registers."""
    file = tmp_path_factory.mktemp("plugin") / "gradient_norms.py"
    file.write_text(CALLBACK)
    load_plugin_file(file)


def test_a_plugin_callback_sees_the_clipped_gradient(tmp_path, gradient_norms):
    """``optimizer.clip_norm`` bounds the norm that the optimizer gets; the metric is the norm before."""
    norms = tmp_path / "norms"
    callback = f"callbacks=[{{name: gradient_norms, options: {{path: {norms}, every: 2}}}}]"
    logged = metrics_of(go(tmp_path, "train.steps=3", "train.eval_every=0", "optimizer.clip_norm=0.01", callback).run)
    assert [float(line) for line in norms.read_text().split()] == pytest.approx([0.01, 0.01], rel=1e-3)
    assert logged[1, "grad/norm"] > 0.02


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["callbacks=[{name: gradient_norm}]"], "did you mean 'gradient_norms'"),
        (
            ["callbacks=[{name: gradient_norms, options: {path: x, evry: 2}}]"],
            r"callbacks\.0\.options: .*gradient_norms.*evry",
        ),
        (["trainer={max_steps: 3}"], r"trainer\.max_steps: got 3; train\.steps"),
        (["trainer={limit_train_batchs: 3}"], r"trainer\.limit_train_batchs: .*did you mean 'limit_train_batches'"),
        (["trainer={limit_train_batches: -3}"], r"trainer: .*limit_train_batches"),
    ],
)
def test_mistakes_in_callbacks_and_trainer_arguments(tmp_path, gradient_norms, overrides, message):
    with pytest.raises(UserError, match=message):
        go(tmp_path, *overrides)
    assert not list(tmp_path.iterdir())


def test_trainer_arguments_reach_the_trainer():
    config = load_config(TINY, ["trainer={limit_train_batches: 3, log_every_n_steps: 7}"])
    trainer = make_trainer(config, [])
    assert (trainer.limit_train_batches, trainer.log_every_n_steps) == (3, 7)


def test_a_checkpoint_of_version_0_1_0_is_resumed(tmp_path):
    """There the state of the data module was part of the module's; the run continues to the same bits."""
    settings = ("train.steps=3", "train.eval_every=0", "lag.mode=replayed", "lag.steps=1")
    whole = go(tmp_path, *settings)
    run = whole.run
    last, before = sorted(run.checkpoints.iterdir(), reverse=True)
    shutil.rmtree(last)
    (run.path / "summary.json").unlink()
    state = torch.load(before / "state.pt", weights_only=True)
    state["kl_comedy"]["stream"] = state.pop("ExperienceModule")
    torch.save(state, before / "state.pt")
    manifest = json.loads((before / "manifest.json").read_text())
    manifest["files"]["state.pt"] = {
        "bytes": (before / "state.pt").stat().st_size,
        "sha256": sha256_file(before / "state.pt"),
    }
    (before / "manifest.json").write_text(json.dumps(manifest))
    policy = weights_of(run)
    assert go(tmp_path, *settings, "resume=auto").run.path == run.path
    assert weights_of(run) == policy
