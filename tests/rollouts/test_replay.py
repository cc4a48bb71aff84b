"""Recording and replay end to end on the tiny pocket policy, and DPO on what was recorded."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from commands import assert_resumed
from kl_comedy.cli.evaluation_runs import resolve_target
from kl_comedy.config import load_config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import load_model, weights_hash
from kl_comedy.rollouts import Sampler
from kl_comedy.training.callbacks import CheckpointCallback
from kl_comedy.training.distributed import SINGLE_PROCESS
from kl_comedy.training.experience import Recorded
from kl_comedy.training.experience_module import build_in_process
from kl_comedy.training.loss import micro_loss, prepare
from kl_comedy.training.run import train
from kl_comedy.training.sampling import build_backend
from training_runs import killed_then_resumed

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
DPO = ["algorithm.dpo={beta: 0.5}", "kl=[]"]


def go(tmp_path, *overrides):
    config = load_config(TINY, [f"output={tmp_path}", *overrides])
    return train(config, console=Console(file=io.StringIO(), width=200), command="kl-comedy train tiny.yaml")


def replaying(path, *overrides):
    return ["rollout.backend=replay", f"rollout.options={{path: {path}}}", *overrides]


def metrics_of(run):
    """``(step, name)`` to value."""
    metrics = {}
    for line in (run.path / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") != "metrics":
            continue
        for name, value in event["data"].items():
            metrics[event["step"], name] = value
    return metrics


def weights_of(run):
    from safetensors.torch import load_file

    return weights_hash(load_file(run.policy / "model.safetensors"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """An on-policy run and its rollouts, in Parquet."""
    return go(tmp_path_factory.mktemp("recorded"), "train.record_rollouts=parquet", "train.eval_every=0").run


@pytest.fixture
def editable(recorded, tmp_path):
    """The rollouts as one JSONL file that a test may spoil: ``edit(change)`` applies ``change`` to the list of rows."""
    import pyarrow.parquet

    rows = []
    for part in sorted((recorded.path / "rollouts").iterdir()):
        rows.extend(pyarrow.parquet.read_table(part).to_pylist())
    for row in rows:
        for name in ("parts", "turn_parts"):
            row[name] = dict(row[name])  # Arrow gives a mapping as pairs
    file = tmp_path / "edited.jsonl"

    def edit(change):
        change(rows)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return edit


def nothing(rows):
    """A change of no row."""


def test_the_recorders_own_configuration_replays_to_the_same_bits(recorded, tmp_path):
    replayed = go(tmp_path, *replaying(recorded.path / "rollouts", "train.eval_every=0")).run
    assert_replayed(replayed, recorded)


def test_a_recording_in_one_file_replays_to_the_same_bits(recorded, editable, tmp_path):
    replayed = go(tmp_path / "file", *replaying(editable(nothing), "train.eval_every=0")).run
    assert_replayed(replayed, recorded)
    # The policy of a replay is evaluated by a sampler that has no recording.
    with resolve_target(str(replayed.path), []) as target:
        config = target.config
        assert build_backend(Sampler.of(config), config, load_model(config.model), SINGLE_PROCESS).own.version == 0


def assert_replayed(run, recorded):
    """It ends in the recorder's weights, and logs no age and no mismatch of samples whose policy it does not know."""
    assert weights_of(run) == weights_of(recorded)
    names = {name for _, name in metrics_of(run)}
    assert not [name for name in names if "staleness" in name]
    assert "policy/mismatch" not in names


def test_two_configurations_see_the_same_rows(recorded, tmp_path, monkeypatch):
    batches = []
    take = Recorded.take

    def watched(self, iteration):
        batch = take(self, iteration)
        batches.append(batch.rows)
        return batch

    # The rows as training takes them, before anything is computed from them.
    monkeypatch.setattr(Recorded, "take", watched)
    path = recorded.path / "rollouts"
    fast = ["train.eval_every=0", "train.checkpoint_every=0"]
    go(tmp_path / "a", *replaying(path, *fast, "seed=3", "kl.0.estimator=k3", "optimizer.lr=1e-2"))
    go(tmp_path / "b", *replaying(path, *fast, *DPO, "algorithm.updates_per_batch=2", "train.steps=16"))
    assert len(batches) == 16, "eight batches each"
    assert batches[:8] == batches[8:]


def test_other_rewards_than_the_recorded_ones_are_refused(recorded, tmp_path):
    with pytest.raises(UserError, match=r"judged by exact_answer, and rewards says zero; .*rewards=again"):
        go(tmp_path, *replaying(recorded.path / "rollouts", "rewards=[{name: zero}]"))


def test_rewards_can_be_judged_again(recorded, tmp_path):
    options = f"rollout.options={{path: {recorded.path}/rollouts, rewards: again}}"
    short = ["train.eval_every=0", "train.steps=2"]
    done = go(tmp_path, "rollout.backend=replay", options, "rewards=[{name: zero}]", *short)
    rewards = {value for (_, name), value in metrics_of(done.run).items() if name == "train/reward"}
    assert rewards == {0.0}


def test_an_exhausted_recording_is_told_before_training(recorded, tmp_path):
    with pytest.raises(UserError, match=r"train\.steps: got 9; allowed: at most 8 .*holds 8 batches.*repeat=true"):
        go(tmp_path, *replaying(recorded.path / "rollouts", "train.steps=9"))
    assert not list(tmp_path.iterdir())


def test_a_recording_may_repeat(recorded, tmp_path, monkeypatch):
    """Batches 9 and 10 of the run are the recording's first and second, completion by completion."""
    rows_of_batch = []
    take = Recorded.take

    def watched(self, iteration):
        batch = take(self, iteration)
        rows_of_batch.append([(row.rollout.completion_ids, row.reward.value) for row in batch.rows])
        return batch

    monkeypatch.setattr(Recorded, "take", watched)
    options = f"rollout.options={{path: {recorded.path}/rollouts, repeat: true}}"
    fast = ["train.steps=10", "train.eval_every=0", "train.checkpoint_every=0"]
    done = go(tmp_path, "rollout.backend=replay", options, *fast)
    assert done.summary["status"] == "FINISHED"
    assert rows_of_batch[:8] == recorded_batches(recorded)
    assert rows_of_batch[8:] == rows_of_batch[:2]


def recorded_batches(recorded):
    """Ids and reward of every completion by batch, read from the files without the package."""
    import pyarrow.parquet

    batches = {}
    for part in sorted((recorded.path / "rollouts").iterdir()):
        for row in pyarrow.parquet.read_table(part).to_pylist():
            batches.setdefault(row["batch"], []).append((tuple(row["completion_ids"]), row["reward"]))
    return [batches[number] for number in sorted(batches)]


def without_log_probs(rows):
    for row in rows:
        del row["logps"]


def other_prompt_ids(rows):
    rows[0]["prompt_ids"] = [3, 4]


def other_text(rows):
    rows[0]["text"] = "?"


def unknown_token(rows):
    rows[0]["completion_ids"][0] = 999


def unknown_problem(rows):
    for row in rows:
        if row["batch"] == 0 and row["group"] == 0:
            row["problem"] = "other"


def other_group(rows):
    rows[0]["group"] = 1


MISFITS = {
    "log-probs": (without_log_probs, [], r"row 1: logps is missing"),
    "prompt ids": (other_prompt_ids, [], r"other token ids than this config .*another tokenizer"),
    "text": (other_text, [], r"does not decode completion_ids to the recorded text"),
    "vocabulary": (unknown_token, [], r"token id 999, and the model's vocab"),
    "problem": (unknown_problem, [], r"data\.train has no problem 'other'"),
    "group order": (other_group, [], r"is of group 1, .*expected group 0"),
    "group size": (nothing, ["rollout.group_size=2"], r"holds 16 completions in 4 groups, .* is 8"),
    "temperature": (nothing, ["rollout.temperature=0.5"], r"rollout\.temperature: got 0\.5; allowed: 1\.0"),
    "template": (nothing, ["data.prompt.prefix='1+'"], r"other token ids than this config"),
    "weights": (
        nothing,
        ["rewards.0.weight=2"],
        r"its parts under the weights of rewards sum to 2\.0; .*rewards=again",
    ),
    "lag": (
        nothing,
        ["lag.mode=replayed", "lag.steps=1"],
        r"lag\.mode: got 'replayed'; allowed: on_policy with rollout",
    ),
}
"""A change of the recorded rows, overrides of the config, and the error."""


@pytest.mark.parametrize(("change", "overrides", "message"), MISFITS.values(), ids=MISFITS)
def test_a_recording_that_does_not_fit_is_refused_before_anything_is_written(
    change, overrides, message, editable, tmp_path
):
    path = editable(change)
    with pytest.raises(UserError, match=message):
        go(tmp_path / "out", *replaying(path, *overrides))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{}", r"rollout\.options: needs path"),
        ("{pth: a}", r"rollout\.options\.pth: no such key .*did you mean 'path'"),
        ("{path: a, rewards: agian}", r"rollout\.options\.rewards: got 'agian'; .*did you mean 'again'"),
        ("{path: nowhere}", "no such file or folder: nowhere"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        go(tmp_path, "rollout.backend=replay", f"rollout.options={options}")


@pytest.mark.slow
def test_a_killed_run_that_records_resumes_to_the_same_bits(tmp_path):
    overrides = ["algorithm.updates_per_batch=2", "train.steps=16", "train.eval_every=0", "train.record_rollouts=jsonl"]
    whole = go(tmp_path / "whole", *overrides).run
    resumed = killed_then_resumed(tmp_path / "killed", overrides, at=5).run
    assert weights_of(resumed) == weights_of(whole)
    recording = recording_of(resumed)
    assert recording == recording_of(whole)
    assert len(recording) == 8, "sixteen updates, two per batch"


def recording_of(run):
    return {file.name: file.read_text() for file in (run.path / "rollouts").iterdir()}


@pytest.mark.parametrize("algorithm", [[], pytest.param(DPO, marks=pytest.mark.slow)], ids=["replay", "dpo"])
def test_a_replay_that_is_interrupted_within_a_batch_resumes_to_the_same_bits(
    algorithm, recorded, tmp_path, monkeypatch
):
    save = CheckpointCallback.save

    def save_and_stop(self, trainer, version):
        save(self, trainer, version)
        if version == 3:
            raise KeyboardInterrupt

    # Update 3 is the first of the second batch.
    updates = ["algorithm.updates_per_batch=2", "train.steps=6", "train.eval_every=0", *algorithm]
    overrides = replaying(recorded.path / "rollouts", *updates)
    whole = go(tmp_path / "whole", *overrides).run
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointCallback, "save", save_and_stop)
        with pytest.raises(RunFailed, match="interrupted at update 3"):
            go(tmp_path / "stopped", *overrides)
    resumed = go(tmp_path / "stopped", "resume=auto", *overrides).run
    assert_resumed(tmp_path / "stopped", at=3)
    assert weights_of(resumed) == weights_of(whole)


def test_what_a_dead_run_drew_after_its_checkpoint_is_removed(recorded, tmp_path):
    """Nothing distinguishes these rows from used ones, so none may be left."""
    overrides = ["train.record_rollouts=jsonl", "train.eval_every=0", "train.checkpoint_every=4"]
    run = go(tmp_path, *overrides, "resume=auto").run
    # As if it had been killed between its checkpoints of updates 4 and 8.
    (run.path / "summary.json").unlink()
    for checkpoint in run.checkpoints.glob("step-00000008*"):
        if checkpoint.is_dir():
            shutil.rmtree(checkpoint)
        else:
            checkpoint.unlink()
    stray = run.path / "rollouts" / "batch-00000099.jsonl"
    stray.write_text("{}")
    go(tmp_path, *overrides, "resume=auto")
    assert_resumed(tmp_path, at=4)
    assert not stray.exists()
    assert len(list((run.path / "rollouts").iterdir())) == 8


def test_the_gradient_of_a_dpo_update_is_autograds_of_the_closed_form(recorded, tmp_path):
    """On the real model, with pairs cut apart by micro-batches, at weights that have left the reference."""
    overrides = replaying(recorded.path / "rollouts", *DPO, "train.microbatch_tokens=40")
    config = load_config(TINY, [f"output={tmp_path}", *overrides])
    module, data = build_in_process(config)
    try:
        move_from_the_reference(module.policy)
        rows = next(batch.rows for batch in data.stream if prompts_with_pairs(batch.rows) > 1)
        micros = prepare(rows, module.plan, betas={}, references=module.references, policy_pass=module.policy_pass)
        groups = {row.rollout.group_id for row in rows}
        assert len(micros) > len(groups), "pairs are cut apart"
        module.zero_grad()
        for micro in micros:
            micro_loss(micro, module.passes(micro), terms={}, betas={}, algorithm=config.algorithm).loss.backward()
        gradient = flat_gradient(module.policy)
        module.zero_grad()
        expected_loss = closed_form(module, rows, beta=0.5)
        expected_loss.backward()
        expected_gradient = flat_gradient(module.policy)
        assert micros[0].notes["dpo/loss"] == pytest.approx(expected_loss.item(), rel=1e-5)
        assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 1e-4
    finally:
        data.close()


def move_from_the_reference(policy):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))


def flat_gradient(policy):
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def by_group(rows):
    """The rows of each prompt, in the order of their groups."""
    groups = {}
    for row in sorted(rows, key=lambda row: row.rollout.group_id):
        groups.setdefault(row.rollout.group_id, []).append(row)
    return list(groups.values())


def pairs_of(group):
    """Every pair ``(better, worse)`` of a prompt's rows."""
    return [(better, worse) for better in group for worse in group if better.reward.value > worse.reward.value]


def prompts_with_pairs(rows):
    """How many prompts have completions that differ in reward."""
    return sum(1 for group in by_group(rows) if pairs_of(group))


def closed_form(module, rows, *, beta):
    """-log sigmoid of beta times the margin, from plain forward passes of transformers, row by row.

    The mean over the pairs of a prompt, then over the prompts that have pairs.
    """
    from kl_comedy.models import load_model

    reference = load_model(module.config.model).model

    def logp(model, row):
        prompt = list(row.rollout.prompt.token_ids)
        ids = list(row.rollout.completion_ids)
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()

    def log_ratio(row):
        with torch.no_grad():
            ref_logp = logp(reference, row)
        return logp(module.policy, row) - ref_logp

    prompt_losses = []
    for group in by_group(rows):
        pair_losses = []
        for better, worse in pairs_of(group):
            margin = log_ratio(better) - log_ratio(worse)
            pair_losses.append(-torch.nn.functional.logsigmoid(beta * margin))
        if pair_losses:
            prompt_losses.append(torch.stack(pair_losses).mean())
    assert len(prompt_losses) > 1
    return torch.stack(prompt_losses).mean()


@pytest.mark.slow
def test_dpo_moves_the_policy_towards_what_was_preferred(tmp_path):
    """One pass over forty recorded batches: held-out reward rises by far more than its noise."""
    size = [
        "rollout.prompts_per_batch=8",
        "train.steps=40",
        "train.microbatch_tokens=4096",
        "train.eval_every=0",
        "train.checkpoint_every=0",
        "data.eval.heldout.limit=78",
        "eval.samples=8",
    ]
    no_evaluation = ["eval.at_start=false", "eval.at_end=false"]
    source = go(tmp_path, *size, "train.record_rollouts=jsonl", "optimizer.lr=1e-5", *no_evaluation)
    path = source.run.path / "rollouts"
    done = go(tmp_path, *replaying(path, *size, *DPO, "optimizer.lr=3e-5"))
    rewards = done.summary["evaluations"]["heldout"]
    assert rewards[40] > rewards[0] + 0.1
    assert done.summary["metrics"]["dpo/margin"] > 0.2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.dpo={beta: 0.1}"], r"kl: got 1 term\(s\); with algorithm\.dpo it must be \[\]"),
        ([*DPO, "algorithm.advantage=grpo"], r"algorithm\.advantage: algorithm\.dpo takes the place"),
        ([*DPO, "algorithm.reduction=sequence_sum"], r"algorithm\.reduction: algorithm\.dpo takes the place"),
        ([*DPO, "rollout.group_size=1"], r"rollout\.group_size: got 1"),
        (["kl=[]", "algorithm.dpo={beta: 0}"], r"algorithm\.dpo\.beta: got 0"),
    ],
)
def test_dpo_beside_what_it_replaces_is_refused(overrides, message, tmp_path):
    with pytest.raises(UserError, match=message):
        go(tmp_path, *overrides)
