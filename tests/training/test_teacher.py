"""KL to a teacher: what is loaded, what is measured, what is refused."""

import copy
import re
from pathlib import Path

import pytest
import torch

from kl_comedy.config import load_config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import LoadedModel, load_model
from kl_comedy.models.reference import match_teacher
from kl_comedy.training.build import check_training
from kl_comedy.training.run import train
from passes import token_pass
from teachers import OTHER, SERVED_TERMS, TEACHER, TINY, save_teacher
from training_runs import SHORT, go, metrics_of, quiet

ROOT = Path(__file__).parents[2]
SERVED = ["reference.teacher={source: pocket, url: 'http://127.0.0.1:1'}"]


@pytest.mark.parametrize("recipe", ["opd/reverse", "opd/forward"])
def test_the_policy_moves_to_a_teacher_of_another_size(tmp_path, recipe):
    metrics = metrics_of(go(tmp_path, *TEACHER, f"kl={recipe}", "train.steps=8", "optimizer.lr=3e-3", *SHORT[1:]).run)
    first_kl = metrics[1, "teacher/k1_reverse_sequence"]
    last_kl = metrics[8, "teacher/k1_reverse_sequence"]
    assert 0 < last_kl < 0.8 * first_kl
    assert metrics[1, "kl/exact_reverse_token"] == 0.0, "against the initial policy still"
    assert metrics[8, "kl/exact_reverse_token"] > 0
    assert metrics[1, "train/loss_policy"] == 0.0, "the reward is only measured"
    assert metrics[1, "train/reward"] > 0, "the reward is only measured"
    assert metrics[1, f"teacher/exact_{recipe.removeprefix('opd/')}_token"] > 0


def test_a_run_learns_the_same_from_a_teacher_behind_a_server(tmp_path, teacher_url):
    settings = [*SERVED_TERMS, "train.steps=3", "optimizer.lr=3e-3", *SHORT[1:]]
    served = go(tmp_path / "served", f"reference.teacher={{source: pocket, url: '{teacher_url}'}}", *settings).run
    local = go(tmp_path / "local", TEACHER[0], *settings).run
    served_metrics = metrics_of(served)
    local_metrics = metrics_of(local)
    for step in (1, 3):
        for name in ("teacher/k1_reverse_sequence", "grad/norm", "train/loss_kl_0", "kl/exact_reverse_token"):
            expected = pytest.approx(local_metrics[step, name], rel=1e-3, abs=1e-5)
            assert served_metrics[step, name] == expected, (step, name)
    assert "teacher.hash" in (served.path / "spool.jsonl").read_text()


def test_g_opd_has_a_beta_below_zero(tmp_path):
    metrics = metrics_of(go(tmp_path, *TEACHER, "kl=g_opd", *SHORT).run)
    assert metrics[1, "beta/0"] == 1.25
    assert metrics[1, "beta/1"] == -0.25
    assert metrics[1, "train/loss_kl_0"] != 0
    assert metrics[1, "train/loss_kl_1"] == 0, "the policy is its initial one yet"
    assert (1, "teacher/exact_reverse_token") not in metrics, "k1 needs no pass of its own"


def test_the_exact_kl_to_the_teacher_needs_one_pass_where_nothing_else_is_measured(tmp_path):
    settings = [*TEACHER, "kl=opd/forward", "train.steps=3", *SHORT[1:]]
    always = metrics_of(go(tmp_path / "always", *settings, "train.exact_kl_every=1").run)
    never = metrics_of(go(tmp_path / "never", *settings, "train.exact_kl_every=0").run)
    assert (2, "kl/exact_reverse_token") in always
    assert (2, "kl/exact_reverse_token") not in never
    for key, value in never.items():
        assert value == pytest.approx(always[key], rel=1e-5, abs=1e-7), key


def test_a_resumed_run_must_have_its_teacher(tmp_path):
    folder = tmp_path / "teacher"
    teacher_hash = save_teacher(folder)
    settings = [f"reference.teacher.source={folder}", "kl=opd/sampled", *SHORT, "resume=auto"]
    run = go(tmp_path, *settings).run
    assert teacher_hash in (run.path / "spool.jsonl").read_text(), "its hash is a tag"
    (run.path / "summary.json").unlink()
    save_teacher(folder, factor=1.01)
    with pytest.raises(RunFailed, match="teacher reference is not the one this run began with"):
        go(tmp_path, *settings)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["kl=opd/reverse"], r"^kl\.0\.reference: got 'teacher'.*reference\.teacher\.source"),
        (TEACHER, r"^reference\.teacher: no KL term has reference: teacher"),
        (
            [*TEACHER, "kl=opd/sampled", "train.strategy=fsdp", "reference.teacher.adapter=a"],
            r"^reference\.teacher\.adapter.*merged",
        ),
        ([*TEACHER, "kl=g_opd", "kl.beta=0.5"], r"^kl\.beta.*betas of their own \(1\.25, -0\.25\)"),
        ([*SERVED, "kl=opd/reverse"], r"^kl\.0: got 'exact'.*the teacher's probability of every token"),
        ([*SERVED, "kl=[{estimator: top_k, reference: teacher}]"], r"^kl\.0: got 'top_k'.*options\.tokens: reference"),
        (
            [*SERVED, "kl=[{estimator: k1, reference: teacher, weight: reference}]"],
            r"^kl\.0: got 'k1'.*every token",
        ),
        ([*SERVED, "kl=opd/sampled", "rollout.temperature=0.7"], r"^rollout\.temperature: got 0\.7.*at temperature 1"),
        (
            [*SERVED, "kl=opd/sampled", "reference.teacher.dtype=bfloat16"],
            r"^reference\.teacher\.dtype.*loaded its model",
        ),
        (["kl=[{estimator: k1, beta: 0.1}, {estimator: k1, beta: -0.1}]"], r"^kl\.1\.beta: got -0\.1.*no upper bound"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_loaded(overrides, message):
    with pytest.raises(UserError, match=message):
        check_training(load_config(TINY, overrides))


@pytest.mark.parametrize("source", ["folder/that/is/gone", "/nowhere"])
def test_the_teacher_is_refused_by_its_key(tmp_path, source):
    with pytest.raises(UserError, match=r"^reference\.teacher\.source: .*no such folder"):
        go(tmp_path, f"reference.teacher.source={tmp_path / source}", "kl=opd/sampled", *SHORT)


@pytest.fixture(scope="module")
def policy():
    return load_model(load_config(TINY, [f"model.options={OTHER}"]).model)


def with_rows(loaded, rows, tokenizer=None):
    model = copy.deepcopy(loaded.model)
    model.resize_token_embeddings(rows, mean_resizing=False)
    return LoadedModel(model=model, tokenizer=tokenizer or loaded.tokenizer, device=loaded.device, source="other")


def test_other_tokens_and_a_smaller_vocabulary_are_refused(policy):
    renamed = copy.deepcopy(policy.tokenizer)
    renamed.add_tokens(["x"])
    with pytest.raises(UserError, match=r"model\.source: got 'other'.*'x' is none there and token 16 here"):
        match_teacher(with_rows(policy, 17, renamed), policy)
    with pytest.raises(UserError, match=r"a head of 16 rows, not 15.*no log-prob of"):
        match_teacher(with_rows(policy, 15), policy)


def test_rows_that_no_token_has_are_cut(policy):
    ids = torch.tensor([[2, 3, 4]])
    batch = {"prompt_ids_BP": ids, "prompt_mask_BP": torch.ones_like(ids), "ids_BT": ids, "mask_BT": ids > 0}
    options = {"temperature": 1.0, "chunk_elements": 10**6}
    padded = with_rows(policy, 24)
    cut = match_teacher(padded, policy)
    assert cut.lm_head.weight.shape[0] == 16
    assert not any(parameter.requires_grad for parameter in cut.parameters())
    logp_BT = token_pass(cut, **batch, **options).logp_BT
    expected_BT = token_pass(policy.model, **batch, **options).logp_BT
    assert torch.allclose(logp_BT, expected_BT, atol=1e-6)


def test_a_lora_adapter_on_the_teacher(policy, tmp_path):
    learn = ["reference.teacher.options={preset: tiny}", "kl=opd/reverse", "optimizer.lr=0.05", *SHORT]
    run = go(tmp_path, "model.lora={rank: 2}", f"model.options={OTHER}", *learn).run
    student = ["kl=opd/sampled", f"model.options={OTHER}", *SHORT]
    merged_teacher = ["reference.teacher.options={}", f"reference.teacher.source={run.path / 'policy'}"]
    adapted_teacher = [f"reference.teacher.options={OTHER}", f"reference.teacher.adapter={run.adapter}"]
    merged = metrics_of(go(tmp_path / "merged", *merged_teacher, *student).run)
    adapted = metrics_of(go(tmp_path / "adapted", *adapted_teacher, *student).run)
    kl_to_teacher = (1, "teacher/k1_reverse_sequence")
    assert adapted[kl_to_teacher] == pytest.approx(merged[kl_to_teacher], rel=1e-4)
    assert abs(adapted[kl_to_teacher]) > 1e-4, "the adapter is on"
    with pytest.raises(UserError, match=r"^reference\.teacher\.adapter: got '.*gone'"):
        go(tmp_path, f"reference.teacher.options={OTHER}", "reference.teacher.adapter=gone", *student)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "models/SmolLM2-135M-Instruct").is_dir(), reason="make smollm2")
def test_smollm2_distils_from_a_checkpoint_of_itself(tmp_path):
    smollm2 = ROOT / "models/SmolLM2-135M-Instruct"
    overrides = [
        f"output={tmp_path}",
        f"model.source={smollm2}",
        f"reference.teacher.source={smollm2}",
        *SHORT,
        "train.checkpoint_every=0",
        "rollout.prompts_per_batch=2",
        "rollout.group_size=2",
        "rollout.max_new_tokens=8",
        "data.train.limit=8",
        "data.eval={}",
        "tracking.uri=none",
    ]
    config = load_config(ROOT / "configs/distillation/smollm2.yaml", overrides)
    metrics = metrics_of(train(config, console=quiet(), command="kl-comedy train smollm2.yaml").run)
    assert metrics[1, "teacher/exact_reverse_token"] == pytest.approx(0.0, abs=1e-6), "it begins as its teacher"
    assert re.fullmatch(r"\d\.\d+.*", str(metrics[2, "train/reward"]))
