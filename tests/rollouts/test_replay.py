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
    metrics = {}
    for line in (run.path / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") == "metrics":
            metrics |= {(event["step"], name): value for name, value in event["data"].items()}
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
    """The rollouts as one JSONL file that a test may spoil: ``edit(change)`` applies ``change`` to every row."""
    import pyarrow.parquet

    rows = [
        {**row, "parts": dict(row["parts"])}
        for part in sorted((recorded.path / "rollouts").iterdir())
        for row in pyarrow.parquet.read_table(part).to_pylist()
    ]
    file = tmp_path / "edited.jsonl"

    def edit(change=lambda row: None):
        for row in rows:
            change(row)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return edit


def test_the_recorders_own_configuration_replays_to_the_same_bits(recorded, editable, tmp_path):
    for name, path in (("parts", recorded.path / "rollouts"), ("file", editable())):
        again = go(tmp_path / name, *replaying(path, "train.eval_every=0")).run
        assert weights_of(again) == weights_of(recorded)
        assert not [key for key in metrics_of(again) if "staleness" in key[1] or key[1] == "policy/mismatch"]
    with resolve_target(str(again.path), []) as target:  # its policy is evaluated, by a sampler that has no recording
        assert build_backend(target.config, load_model(target.config.model), SINGLE_PROCESS).own.version == 0


def test_two_configurations_see_the_same_rows(recorded, tmp_path, monkeypatch):
    batches, take = [], Recorded.take

    def watched(self, iteration):
        batch = take(self, iteration)
        batches.append(batch.rows)
        return batch

    monkeypatch.setattr(Recorded, "take", watched)
    path = recorded.path / "rollouts"
    fast = ["train.eval_every=0", "train.checkpoint_every=0"]
    go(tmp_path / "a", *replaying(path, *fast, "seed=3", "kl.0.estimator=k3", "optimizer.lr=1e-2"))
    go(tmp_path / "b", *replaying(path, *fast, *DPO, "algorithm.updates_per_batch=2", "train.steps=16"))
    assert len(batches) == 16 and batches[:8] == batches[8:]


def test_rewards_can_be_judged_again(recorded, tmp_path):
    with pytest.raises(UserError, match=r"judged by exact_answer, and rewards says zero; .*rewards=again"):
        go(tmp_path, *replaying(recorded.path / "rollouts", "rewards=[{name: zero}]"))
    again = f"rollout.options={{path: {recorded.path}/rollouts, rewards: again}}"
    done = go(
        tmp_path, "rollout.backend=replay", again, "rewards=[{name: zero}]", "train.eval_every=0", "train.steps=2"
    )
    assert {value for (_, name), value in metrics_of(done.run).items() if name == "train/reward"} == {0.0}


def test_an_exhausted_recording_is_told_before_training_and_may_repeat(recorded, tmp_path):
    path = recorded.path / "rollouts"
    with pytest.raises(UserError, match=r"train\.steps: got 9; allowed: at most 8 .*holds 8 batches.*repeat=true"):
        go(tmp_path, *replaying(path, "train.steps=9"))
    assert not list(tmp_path.iterdir())
    again = f"rollout.options={{path: {path}, repeat: true}}"
    assert (
        go(tmp_path, "rollout.backend=replay", again, "train.steps=9", "train.eval_every=0").summary["status"]
        == "FINISHED"
    )


def first(**values):
    """A change of the first row that it is applied to."""
    done = []

    def change(row):
        if not done:
            done.append(row.update({k: v(row) if callable(v) else v for k, v in values.items()}))

    return change


def rename_first_group(row):
    if (row["batch"], row["group"]) == (0, 0):
        row["problem"] = "other"


SPOILT = {
    "log-probs": (lambda row: row.pop("logps"), [], r"row 1: logps is missing"),
    "prompt ids": (first(prompt_ids=[3, 4]), [], r"other token ids than this config .*another tokenizer"),
    "text": (first(text="?"), [], r"does not decode completion_ids to the recorded text"),
    "vocabulary": (
        first(completion_ids=lambda row: [999, *row["completion_ids"][1:]]),
        [],
        r"token id 999, and the model's vocab",
    ),
    "problem": (rename_first_group, [], r"data\.train has no problem 'other'"),
    "group order": (first(group=1), [], r"is of group 1, .*expected group 0"),
    "group size": (lambda row: None, ["rollout.group_size=2"], r"holds 16 completions in 4 groups, .* is 8"),
    "temperature": (lambda row: None, ["rollout.temperature=0.5"], r"rollout\.temperature: got 0\.5; allowed: 1\.0"),
    "template": (lambda row: None, ["data.prompt.prefix='1+'"], r"other token ids than this config"),
    "weights": (
        lambda row: None,
        ["rewards.0.weight=2"],
        r"its parts under the weights of rewards sum to 2\.0; .*rewards=again",
    ),
    "lag": (
        lambda row: None,
        ["lag.mode=replayed", "lag.steps=1"],
        r"lag\.mode: got 'replayed'; allowed: on_policy with rollout",
    ),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_recording_that_does_not_fit_is_refused_before_anything_is_written(fault, editable, tmp_path):
    change, overrides, said = SPOILT[fault]
    path = editable(change)
    with pytest.raises(UserError, match=said):
        go(tmp_path / "out", *replaying(path, *overrides))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{}", r"rollout\.options: needs path"),
        ("{pth: a}", r"rollout\.options\.pth: no such key .*did you mean 'path'"),
        ("{path: a, rewards: agian}", r"rollout\.options\.rewards: got 'agian'; .*did you mean 'again'"),
        ("{path: nowhere}", "no such file or folder: nowhere"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said, tmp_path):
    with pytest.raises(UserError, match=said):
        go(tmp_path, "rollout.backend=replay", f"rollout.options={options}")


@pytest.mark.slow
def test_a_killed_run_that_records_resumes_to_the_same_bits(tmp_path):
    overrides = ["algorithm.updates_per_batch=2", "train.steps=16", "train.eval_every=0", "train.record_rollouts=jsonl"]
    whole = go(tmp_path / "whole", *overrides).run
    resumed = killed_then_resumed(tmp_path / "killed", overrides, at=5).run
    assert weights_of(resumed) == weights_of(whole)
    files = [{f.name: f.read_text() for f in (run.path / "rollouts").iterdir()} for run in (whole, resumed)]
    assert files[0] == files[1] and len(files[0]) == 8


@pytest.mark.parametrize("algorithm", [[], pytest.param(DPO, marks=pytest.mark.slow)], ids=["replay", "dpo"])
def test_a_replay_that_is_interrupted_within_a_batch_resumes_to_the_same_bits(
    algorithm, recorded, tmp_path, monkeypatch
):
    save = CheckpointCallback.save

    def save_and_stop(self, trainer, version):
        save(self, trainer, version)
        if version == 3:
            raise KeyboardInterrupt

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
    """Nothing tells these rows from used ones, so none may be left."""
    overrides = ["train.record_rollouts=jsonl", "train.eval_every=0", "train.checkpoint_every=4"]
    run = go(tmp_path, *overrides, "resume=auto").run
    (run.path / "summary.json").unlink()
    for checkpoint in run.checkpoints.glob("step-00000008*"):
        shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
    stray = run.path / "rollouts" / "batch-00000099.jsonl"
    stray.write_text("{}")
    go(tmp_path, *overrides, "resume=auto")
    assert_resumed(tmp_path, at=4)
    assert len(list((run.path / "rollouts").iterdir())) == 8 and not stray.exists()


def test_the_gradient_of_a_dpo_update_is_autograds_of_the_closed_form(recorded, tmp_path):
    """On the real model, with pairs cut apart by micro-batches, at weights that have left the reference."""
    config = load_config(
        TINY, [f"output={tmp_path}", *replaying(recorded.path / "rollouts", *DPO, "train.microbatch_tokens=40")]
    )
    module, data = build_in_process(config)
    try:
        with torch.no_grad():
            g = torch.Generator().manual_seed(0)
            for p in module.policy.parameters():
                p.add_(0.01 * torch.randn(p.shape, generator=g))
        batch = next(batch for batch in data.stream if with_pairs(batch.rows) > 1)
        micros = prepare(
            batch.rows, module.plan, betas={}, references=module.references, policy_pass=module.policy_pass
        )
        assert len(micros) > batch_groups(batch.rows)
        module.zero_grad()
        for micro in micros:
            micro_loss(micro, module.passes(micro), terms={}, betas={}, algorithm=config.algorithm).loss.backward()
        got = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
        module.zero_grad()
        loss = closed_form(module, batch.rows, beta=0.5)
        loss.backward()
        wanted = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
        assert micros[0].notes["dpo/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert float((got - wanted).norm() / wanted.norm()) < 1e-4
    finally:
        data.close()


def batch_groups(rows):
    return len({row.rollout.group_id for row in rows})


def with_pairs(rows):
    """Prompts whose completions differ in reward."""
    rewards = {}
    for row in rows:
        rewards.setdefault(row.rollout.group_id, set()).add(row.reward.value)
    return sum(len(values) > 1 for values in rewards.values())


def closed_form(module, rows, *, beta):
    """-log sigmoid of the margin, from plain forward passes of transformers, row by row."""

    def logp(model, row):
        prompt, ids = list(row.rollout.prompt.token_ids), list(row.rollout.completion_ids)
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()

    from kl_comedy.models import load_model

    reference = load_model(module.config.model).model
    with torch.no_grad():
        ref = [logp(reference, row) for row in rows]
    h = [logp(module.policy, row) - r for row, r in zip(rows, ref, strict=True)]
    of_prompts = []
    for group in sorted({row.rollout.group_id for row in rows}):
        own = [n for n, row in enumerate(rows) if row.rollout.group_id == group]
        pairs = [(i, j) for i in own for j in own if rows[i].reward.value > rows[j].reward.value]
        if pairs:
            of_prompts.append(
                torch.stack([-torch.nn.functional.logsigmoid(beta * (h[i] - h[j])) for i, j in pairs]).mean()
            )
    assert len(of_prompts) > 1
    return torch.stack(of_prompts).mean()


@pytest.mark.slow
def test_dpo_moves_the_policy_towards_what_was_preferred(tmp_path):
    """One pass over forty recorded batches: held-out reward rises by far more than its noise."""
    size = ["rollout.prompts_per_batch=8", "train.steps=40", "train.microbatch_tokens=4096", "train.eval_every=0"]
    size += ["train.checkpoint_every=0", "data.eval.heldout.limit=78", "eval.samples=8"]
    source = go(
        tmp_path, *size, "train.record_rollouts=jsonl", "optimizer.lr=1e-5", "eval.at_start=false", "eval.at_end=false"
    )
    path = source.run.path / "rollouts"
    done = go(tmp_path, *replaying(path, *size, *DPO, "optimizer.lr=3e-5"))
    rewards = done.summary["evaluations"]["heldout"]
    assert rewards[40] > rewards[0] + 0.1
    assert done.summary["metrics"]["dpo/margin"] > 0.2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.dpo={beta: 0.1}"], r"kl: got 1 term\(s\); with algorithm\.dpo it must be \[\]"),
        ([*DPO, "algorithm.advantage=grpo"], r"algorithm\.advantage: algorithm\.dpo takes the place"),
        ([*DPO, "algorithm.reduction=sequence_sum"], r"algorithm\.reduction: algorithm\.dpo takes the place"),
        ([*DPO, "rollout.group_size=1"], r"rollout\.group_size: got 1"),
        (["kl=[]", "algorithm.dpo={beta: 0}"], r"algorithm\.dpo\.beta: got 0"),
    ],
)
def test_dpo_beside_what_it_replaces_is_refused(overrides, said, tmp_path):
    with pytest.raises(UserError, match=said):
        go(tmp_path, *overrides)
