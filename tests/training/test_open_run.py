"""Which folder a run trains in: a new one, an earlier one, or a refusal; and two starts at the same moment."""

import io
import json
import re
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from kl_comedy import plugins
from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.training.open_run import Opened, create_run, open_run
from kl_comedy.training.run_folder import RunDir
from ranks import spawn
from training_runs import TINY


def config_in(folder, *overrides):
    return load_config(TINY, [f"output={folder}", "resume=auto", "train.steps=4", *overrides])


def begun(folder, *overrides, status=None, checkpoint=None):
    """The folder of a run that has begun, or has ended with ``status``."""
    config = config_in(folder, *overrides)
    opened = create_run(
        Opened(kind="new", folder=open_run(config_in(folder, *overrides, "resume=never")).folder), config
    )
    run = RunDir(path=opened.folder)
    if status is not None:
        names = ("name", "kl", "command", "evaluate_command", "mlflow_uri")
        run.write_summary({"status": status, "steps": config.train.steps, **dict.fromkeys(names, "")})
    if checkpoint is not None:
        (run.checkpoints / f"step-{checkpoint:08d}.ckpt").mkdir()
    return run.path


def opened_in(folder, *overrides):
    return open_run(config_in(folder, *overrides))


def everything_in(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_the_first_run_is_new_and_nothing_is_written(tmp_path):
    opened = opened_in(tmp_path / "runs")
    assert opened == Opened(kind="new", folder=tmp_path / "runs" / "tiny-1")
    assert not (tmp_path / "runs").exists()


def test_the_newest_run_that_differs_in_nothing_is_resumed(tmp_path):
    begun(tmp_path)
    second = begun(tmp_path)
    begun(tmp_path, "seed=5")
    assert opened_in(tmp_path) == Opened(kind="resumed", folder=second)
    assert opened_in(tmp_path, "seed=5").folder == tmp_path / "tiny-3"


def test_without_resume_every_start_is_a_new_run_after_the_largest_number(tmp_path):
    begun(tmp_path)
    begun(tmp_path).rename(tmp_path / "tiny-41")
    for other in ("tiny", "tiny-x", "tiny-1-7", "tin-99", "tiny-", "tiny-007x", "tiny-10000000000"):
        (tmp_path / other).mkdir()
    assert opened_in(tmp_path, "resume=never") == Opened(kind="new", folder=tmp_path / "tiny-42")


@pytest.mark.parametrize("status", ["FAILED", "KILLED", "FINISHED", None])
def test_a_finished_run_is_not_trained_again_and_any_other_is_resumed(tmp_path, status):
    run = begun(tmp_path, status=status)
    kind = "resumed"
    if status == "FINISHED":
        kind = "finished"
    assert opened_in(tmp_path) == Opened(kind=kind, folder=run)
    assert opened_in(tmp_path, f"resume={run}") == Opened(kind=kind, folder=run)


@pytest.mark.parametrize(
    "change",
    ["tracking.experiment=other", "audit.every=1", "train={strategy: ddp, devices: 2}", "tracking.tags={a: b}"],
)
def test_what_may_change_makes_no_other_run(tmp_path, change):
    run = begun(tmp_path)
    assert opened_in(tmp_path, change) == Opened(kind="resumed", folder=run)
    assert opened_in(tmp_path / "elsewhere", change, f"resume={run}") == Opened(kind="resumed", folder=run)


def test_a_new_run_says_in_which_keys_the_newest_of_its_name_differs(tmp_path):
    begun(tmp_path, "optimizer.lr=0.25")
    run = begun(tmp_path)
    opened = opened_in(tmp_path, "optimizer.lr=0.5", "kl=[{estimator: k2, placement: loss, beta: 0.5}]")
    assert opened.kind == "new"
    assert opened.folder == tmp_path / "tiny-3"
    assert re.fullmatch(rf"a new run: {run} differs in (?=.*kl)(?=.*optimizer\.lr)[^\n]*", opened.reason)


def test_seeds_and_other_names_are_not_worth_a_word(tmp_path):
    begun(tmp_path)
    assert opened_in(tmp_path, "seed=1") == Opened(kind="new", folder=tmp_path / "tiny-2")
    assert opened_in(tmp_path, "name=tin") == Opened(kind="new", folder=tmp_path / "tin-1")
    assert opened_in(tmp_path, "resume=never", "optimizer.lr=0.5").reason is None


# --- more updates ----------------------------------------------------------------------------------------------------


def test_more_updates_extend_the_newest_run_that_has_a_checkpoint_in_a_folder_of_its_own(tmp_path):
    run = begun(tmp_path, status="FINISHED", checkpoint=4)
    expected = Opened(kind="extended", folder=tmp_path / "tiny-2", extends=run)
    assert opened_in(tmp_path, "train.steps=9") == expected
    assert opened_in(tmp_path, "train.steps=9", f"resume={run}") == expected


def test_the_run_of_as_many_updates_comes_before_one_of_fewer(tmp_path):
    longer = begun(tmp_path, "train.steps=9")
    begun(tmp_path, status="FINISHED", checkpoint=4)
    assert opened_in(tmp_path, "train.steps=9") == Opened(kind="resumed", folder=longer)


def test_the_extended_run_is_resumed_by_the_same_command(tmp_path):
    run = begun(tmp_path, status="FINISHED", checkpoint=4)
    extended = begun(tmp_path, "train.steps=9")
    words = ["train.steps=9", f"resume={run}"]
    # Of another run, or of none.
    assert opened_in(tmp_path, *words).kind == "extended"
    (extended / "extends.json").write_text(json.dumps({"run": run.name, "update": 4}))
    assert opened_in(tmp_path, *words) == Opened(kind="resumed", folder=extended)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.schedule=cosine"], "cannot be extended: optimizer.schedule cosine ends at train.steps"),
        (["lag={mode: replayed, steps: 2}"], "would have to be 2 updates old, and were not drawn"),
    ],
    ids=["schedule", "lag"],
)
def test_updates_that_depended_on_their_number_are_not_extended(tmp_path, overrides, message):
    run = begun(tmp_path, *overrides, status="FINISHED", checkpoint=4)
    with pytest.raises(UserError, match=rf"^resume: {run} .*{message}"):
        opened_in(tmp_path, *overrides, "train.steps=9", f"resume={run}")
    opened = opened_in(tmp_path, *overrides, "train.steps=9")
    assert opened.kind == "new"
    assert opened.reason.startswith(f"a new run: {run} ")
    assert message in opened.reason


def test_a_run_without_a_checkpoint_is_not_extended(tmp_path):
    run = begun(tmp_path)
    with pytest.raises(UserError, match=rf"^resume: {run} has no checkpoint to continue from"):
        opened_in(tmp_path, "train.steps=9", f"resume={run}")
    assert opened_in(tmp_path, "train.steps=9").kind == "new"


def test_fewer_updates_are_refused_where_a_run_is_named_and_a_new_run_else(tmp_path):
    run = begun(tmp_path, status="FINISHED", checkpoint=4)
    before = everything_in(tmp_path)
    with pytest.raises(
        UserError, match=rf"^train.steps: got 3; allowed: at least the 4 updates of {run}, to resume it"
    ):
        opened_in(tmp_path, "train.steps=3", f"resume={run}")
    opened = opened_in(tmp_path, "train.steps=3")
    assert opened == Opened(kind="new", folder=tmp_path / "tiny-2", reason=f"a new run: {run} differs in train.steps")
    assert everything_in(tmp_path) == before


# --- a run that is named ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["seed=5"], "seed"),
        (["name=other"], "name"),
        (["optimizer.lr=0.1", "train.steps=9"], "optimizer.lr"),
        (["optimizer={lr: 0.1, clip_norm: 0.5}"], "optimizer.lr, optimizer.clip_norm"),
    ],
)
def test_a_named_run_of_another_config_is_refused_with_the_keys(tmp_path, overrides, keys):
    run = begun(tmp_path, checkpoint=4)
    before = everything_in(tmp_path)
    with pytest.raises(
        UserError, match=rf"^resume: {run} was trained with another {re.escape(keys)}; of what makes a run"
    ):
        opened_in(tmp_path, f"resume={run}", *overrides)
    assert everything_in(tmp_path) == before


def test_a_folder_without_its_config_is_refused_where_it_is_named_and_passed_over_else(tmp_path):
    run = begun(tmp_path)
    (run / "config.yaml").unlink()
    before = everything_in(tmp_path)
    with pytest.raises(UserError, match=rf"^resume: {run} is not the folder of a run: it holds no config.yaml$"):
        opened_in(tmp_path, f"resume={run}")
    opened = opened_in(tmp_path)
    assert opened.folder == tmp_path / "tiny-2"
    assert opened.reason.startswith(f"a new run: {run} is passed over: no such config file")
    with pytest.raises(UserError, match=rf"^{run} is not the folder of a run: it holds no config.yaml; move it away"):
        open_run(config_in(tmp_path), folder=run)
    assert everything_in(tmp_path) == before


def test_the_nearest_run_is_named_where_there_is_none(tmp_path):
    run = begun(tmp_path)
    with pytest.raises(UserError, match=rf"^resume: {tmp_path}/tiny-7 is not .*; did you mean {run}\?$"):
        opened_in(tmp_path, f"resume={tmp_path}/tiny-7")


def test_a_run_of_a_later_version_is_refused(tmp_path):
    run = begun(tmp_path)
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("schema: 1", "schema: 2"))
    with pytest.raises(UserError, match=rf"^{file}: schema: got 2; allowed: 1 \(it was written by another version"):
        opened_in(tmp_path, f"resume={run}")
    assert "schema: got 2" in opened_in(tmp_path).reason


def test_a_changed_plugin_is_one_more_key(tmp_path, monkeypatch):
    plain = begun(tmp_path)
    monkeypatch.setitem(plugins.PLUGIN_FILES, "my_parts.py", b"x = 1\n")
    assert opened_in(tmp_path).reason == f"a new run: {plain} differs in plugins.my_parts.py"
    first = begun(tmp_path)
    assert (first / "plugins/my_parts.py").read_text() == "x = 1\n"
    assert opened_in(tmp_path) == Opened(kind="resumed", folder=first)
    monkeypatch.setitem(plugins.PLUGIN_FILES, "my_parts.py", b"x = 2; api_key = 'of mine'\n")
    assert opened_in(tmp_path).reason == f"a new run: {first} differs in plugins.my_parts.py"
    with pytest.raises(UserError, match=rf"^resume: {first} was trained with another plugins.my_parts.py; "):
        opened_in(tmp_path, f"resume={first}")
    third = begun(tmp_path)
    assert "of mine" not in (third / "plugins/my_parts.py").read_text()
    assert opened_in(tmp_path) == Opened(kind="resumed", folder=third)


# --- a folder that a sweep gives -------------------------------------------------------------------------------------


def test_the_run_of_a_cell_is_in_its_folder_whatever_resume_says(tmp_path):
    folder = tmp_path / "cell" / "run"
    config = config_in(tmp_path, "resume=never")
    opened = open_run(config, folder=folder)
    assert opened == Opened(kind="new", folder=folder)
    assert create_run(opened, config, folder) == opened
    assert open_run(config, folder=folder) == Opened(kind="resumed", folder=folder)
    other = config_in(tmp_path, "seed=5")
    with pytest.raises(UserError, match=rf"^{folder} was trained with another seed; move it away to train anew"):
        open_run(other, folder=folder)


def test_runs_of_cells_are_told_apart_by_sweep_and_cell(tmp_path):
    assert RunDir(path=tmp_path / "sweeps/grid/cells/0007/run").label == "grid-0007"
    assert RunDir(path=tmp_path / "runs/tiny-1").label == "tiny-1"
    assert RunDir(path=tmp_path / "runs/run").label == "run"


# --- several processes -----------------------------------------------------------------------------------------------


def test_of_two_starts_at_the_same_moment_one_makes_the_run(tmp_path):
    config = config_in(tmp_path)
    answers = [open_run(config), open_run(config)]
    assert create_run(answers[0], config).folder == tmp_path / "tiny-1"
    before = everything_in(tmp_path)
    with pytest.raises(UserError, match=rf"^{tmp_path}/tiny-1 was begun at the same moment by another start") as error:
        create_run(answers[1], config)
    assert "\n" not in str(error.value)
    assert everything_in(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-1"]


@pytest.mark.parametrize("difference", ["resume=never", "seed"])
def test_many_starts_at_the_same_moment_of_several_runs_make_as_many_folders(tmp_path, difference):
    configs = []
    for number in range(6):
        word = f"seed={number}" if difference == "seed" else difference
        configs.append(config_in(tmp_path, word))
    answers = [open_run(config) for config in configs]
    assert {answer.folder.name for answer in answers} == {"tiny-1"}
    folders = []

    def start(config, answer):
        folders.append(create_run(answer, config).folder.name)

    threads = [threading.Thread(target=start, args=pair) for pair in zip(configs, answers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(folders) == [f"tiny-{number}" for number in range(1, 7)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(folders)
    for path in tmp_path.iterdir():
        assert (path / "config.yaml").is_file()


def test_a_start_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def killed(*_, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kl_comedy.training.open_run.atomic_write", killed)
    config = config_in(tmp_path / "runs")
    with pytest.raises(KeyboardInterrupt):
        create_run(open_run(config), config)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    config = config_in(tmp_path / "file")
    with pytest.raises(UserError, match=rf"^output: cannot create {tmp_path}/file/tiny-1: "):
        create_run(Opened(kind="new", folder=tmp_path / "file" / "tiny-1"), config)


def asked(rank, world, folder):
    """What each rank is told, where rank 1 sees a disk with another newest run."""
    from kl_comedy.training.distributed import Ranks
    from kl_comedy.training.run_record import RunRecord
    from kl_comedy.training.stop_signals import StopRequest

    console = Console(file=io.StringIO(), width=200)
    record = RunRecord(config_in(folder / f"disk {rank}"), console, "", StopRequest())
    record.ask(Ranks(rank=rank, size=world))
    return {name: str(value) for name, value in asdict(record._opened).items()}


def test_all_ranks_resume_the_run_that_rank_zero_sees(tmp_path):
    run = begun(tmp_path / "disk 0")
    for _ in range(3):
        begun(tmp_path / "disk 1", status="FINISHED")
    answers = spawn(asked, tmp_path)
    assert answers[0] == answers[1]
    assert answers[0]["folder"] == str(run)
    assert answers[0]["kind"] == "resumed"
