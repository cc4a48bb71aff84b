"""``kl-comedy check``: what a config would start, or the reason why it cannot."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from kl_comedy.cli.check import what_starts
from kl_comedy.cli.main import app
from kl_comedy.config import flatten, load_config, to_plain
from kl_comedy.errors import UserError
from kl_comedy.records import Capabilities
from kl_comedy.registry import ROLLOUTS
from kl_comedy.training.build import build_run, warn_about

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
ROOT = Path(__file__).parents[2]


def starts(*overrides):
    return what_starts(load_config(TINY, overrides), gpus=0)


def test_the_default_sampler_is_in_the_trainers_process():
    assert starts()["sampler"] == "hf in the trainer's process"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "1 process"),
        (["train.strategy=ddp", "train.devices=2"], "2 processes, strategy ddp"),
        (["train.strategy=fsdp", "train.devices=2", "train.nodes=2"], "4 processes on 2 nodes, strategy fsdp"),
    ],
)
def test_the_processes_in_plain_words(overrides, words):
    assert starts(*overrides, "rollout.prompts_per_batch=4")["processes"] == words


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["algorithm.updates_per_batch=2"], ["no KL of this run acts: k1_reverse_token in loss: off-policy"]),
        (["kl.0.beta=0"], ["no KL of this run acts: every beta is 0, so that it is measured only"]),
        (["kl=[{estimator: k1, placement: loss, beta: 0}, {estimator: k2, placement: loss}]"], []),
        (["kl=[]"], []),
    ],
)
def test_a_run_in_which_no_kl_acts_says_so_in_one_line(overrides, lines, caplog):
    config = load_config(TINY, ["kl=[{estimator: k1, placement: loss}]", *overrides])
    warn_about(build_run(config))
    assert len(caplog.messages) == len(lines)
    for message, beginning in zip(caplog.messages, lines, strict=True):
        assert message.startswith(beginning)


def test_an_asynchronous_run_over_ranks_starts_a_server_beside_them():
    rows = starts("train.strategy=fsdp", "train.devices=2", "lag.mode=async", "lag.max_steps=3", "lag.in_flight=true")
    assert rows["processes"] == "2 processes, strategy fsdp"
    assert rows["sampler"].startswith("hf_server beside the trainer: 1, started by the run")
    assert rows["samples"].endswith("at most 3 updates old, wait, weights in flight")


def test_several_updates_of_a_batch_are_off_policy_in_every_row():
    rows = starts("kl=[{estimator: k1, placement: reward, beta: 0.1}]")
    assert rows["samples"].endswith("; on-policy")
    assert "on-policy sequence_reverse" in rows["kl.0"]
    rows = starts("kl=[{estimator: k2, placement: reward, beta: 0.1}]", "algorithm.updates_per_batch=2")
    assert rows["samples"].endswith("off-policy after the first update of each batch")
    assert rows["kl.0"].endswith("beta 0.1: off-policy the gradient of no function")
    assert rows["learning"] == "rate 0.001, constant, of all weights"


def test_a_term_without_a_coefficient_does_not_act():
    rows = starts("kl=[{estimator: k1, placement: reward, beta: 0}, {estimator: k2, placement: loss, beta: 0.1}]")
    assert rows["kl.0"] == "k1_reverse_token in reward to_go, beta 0: does not act, is measured only"
    assert "on-policy token_reverse" in rows["kl.1"]


def test_servers_elsewhere_get_the_merged_adapter_through_a_folder():
    urls = "rollout.options={urls: ['http://a:1', 'http://b:2']}"
    rows = starts("rollout.backend=vllm_server", urls, "model.lora={rank: 2}")
    assert "2 at http://a:1, http://b:2" in rows["sampler"]
    assert rows["weights"].startswith("transport folder, staged by rank 0, the adapter merged")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the transport is another")
def test_without_a_gpu_weights_go_over_gloo():
    assert starts("rollout.backend=vllm_server")["weights"].startswith("transport gloo, staged by rank 0;")


def test_an_own_server_gets_the_adapter_alone():
    rows = starts("rollout.backend=vllm_server", "model.lora={rank: 2}")
    assert rows["weights"].startswith("transport adapter, staged by rank 0;")


def test_shards_are_gathered_up_to_a_limit():
    assert "at most 16 GiB" in starts("train.strategy=fsdp")["weights"]


def test_recorded_batches_are_read_by_rank_0():
    rows = starts("rollout.backend=replay", "rollout.options={path: old}", "lag.mode=on_policy")
    assert rows["sampler"].startswith("replay: batches of old, read by rank 0")


def test_the_command_prints_json_with_memory():
    done = CliRunner().invoke(app, ["check", str(TINY), "--format", "json", "--gpu", "cpu"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert rows["memory"].endswith("on cpu: fits")
    assert rows["updates"] == "8, a checkpoint every 1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.options={treads: 2}", "lag.mode=async"], r"options\.treads: .*did you mean 'threads'"),
        (["rollout.options={servers: 2}"], r"rollout\.options\.servers: no such key"),
        (["rollout.backend=hf_server", "rollout.options={transport: nccl}"], r"options\.transport: got 'nccl'"),
        (["rollout.backend=vllm", "train.strategy=fsdp"], "each draws a part of a batch, and this backend draws it"),
        (["rollout.top_p=0.9"], r"rollout\.top_p: no such key \(given 0\.9\): it is rollout.truncation.top_p"),
        (["algorithm.value={lam: 0.5}"], r"algorithm\.value: rloo has no value function"),
        (["train.strategy=ddp", "train.devices=3"], r"rollout\.prompts_per_batch: got 4; allowed: a multiple of 3"),
        (["rollout.backend=own", "lag.mode=async"], "an engine beside them has to draw"),
    ],
)
def test_the_reason_where_it_cannot_run(overrides, message, monkeypatch):
    monkeypatch.setattr(ROLLOUTS, "_entries", dict(ROLLOUTS._entries))
    ROLLOUTS.register("own", source="tests", summary="In process.", capabilities=Capabilities())(lambda *_: None)
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["check", str(TINY), *overrides], catch_exceptions=False)


VLLM = "rollout.backend=vllm_server"


@pytest.mark.parametrize(
    ("gpus", "overrides", "transport"),
    [
        (0, [], "gloo"),
        (1, [], "ipc"),
        (8, [], "nccl"),
        (8, ["rollout.options={servers: 2, gpus: ['0', '1']}"], "gloo"),
    ],
    ids=["no GPU", "one GPU for both", "GPUs of their own", "a GPU of the trainer's for a server"],
)
def test_the_transport_is_the_one_of_a_run_on_as_many_gpus(gpus, overrides, transport):
    weights = what_starts(load_config(TINY, [VLLM, *overrides]), gpus=gpus)["weights"]
    assert weights.split(",")[0] == f"transport {transport}"


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (
            ["train.strategy=fsdp", "train.devices=2"],
            1,
            r"train\.devices: got 2; allowed: at most 1 \(each process has",
        ),
        (
            [VLLM, "rollout.options={servers: 3}"],
            2,
            r"rollout\.options\.servers: got 3; allowed: at most 1 \(a node has 2",
        ),
        ([VLLM, "rollout.options={servers: 2, gpus: ['0', '0']}"], 2, r"gpus: got .* GPUs 0 to 1, each once"),
        ([VLLM, "rollout.options={gpus: ['2']}"], 2, r"gpus: got .* GPUs 0 to 1, each once"),
        (
            [VLLM, "rollout.options={gpus: ['1'], tensor_parallel_size: 2}"],
            2,
            r"gpus: got .* allowed: 2 for each server",
        ),
        ([VLLM, "rollout.options={servers: 2, gpus: ['1']}"], 2, r"gpus: got .* one entry for each of the 2 servers"),
    ],
)
def test_a_process_or_an_engine_without_a_gpu_is_refused(overrides, gpus, message):
    arguments = ["check", str(TINY), *overrides, "--gpus", str(gpus), "--no-memory"]
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def has_rollouts(path):
    """Whether it is a config of a run that draws: not a grid, a profile or one without engines."""
    keys = yaml.safe_load(path.read_text()) or {}
    return "rollout" in keys


CONFIGS = [path for path in sorted((ROOT / "configs").glob("**/*.yaml")) if has_rollouts(path)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_the_engines_of_every_config_are_the_ones_that_its_settings_name(path):
    assert what_starts(load_config(path), gpus=0)["sampler"]


# --- what train would refuse ----------------------------------------------------------------------------------------

TWO_PROCESSES = ["train.strategy=ddp", "train.devices=2"]
NO_PATH = "data.train={dataset: csv, path: nope.csv}"


@pytest.fixture
def config(tmp_path):
    """The tiny config without its data, whose options belong to another loader."""
    values = yaml.safe_load(TINY.read_text())
    del values["data"]["train"]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.nope=1"], r"trainer\.nope: no such key"),
        (["output=/proc/x"], r"output: cannot write /proc/x"),
        (["model.source=models/nowhere"], r"model\.source: .*models/nowhere"),
        (["reference.teacher={source: models/nowhere}"], r"reference\.teacher"),
        (["data.train.path=nope.csv"], r"data\.train\.path: got 'nope\.csv', but the dataset 'pocket' does not use it"),
        ([NO_PATH], r"data\.train\.path: got 'nope\.csv'"),
        ([NO_PATH, *TWO_PROCESSES], r"data\.train\.path: got 'nope\.csv'"),
        (["data.train.split=nowhere", *TWO_PROCESSES], r"data\.train\.split: got 'nowhere'"),
        (
            ["data.train={dataset: hub, path: x}"],
            r"data\.train\.path: got 'x', but the dataset 'hub' does not use it",
        ),
        (
            ["data.train={dataset: hub, name: openai/gsm8k}"],
            r"data\.train\.split: the dataset 'hub' needs it",
        ),
        (["kl=k4"], r"kl: got 'k4', .*; did you mean 'kl=\[\{estimator: k3, placement: loss\}\]'\?"),
        (["kl=[{estimator: k4}]"], r"kl\.0\.estimator: got 'k4'; did you mean 'k3'\?"),
        (["eval.suites=[gsm8kk]"], r"eval\.suites: .*did you mean 'gsm8k'"),
    ],
)
def test_what_train_refuses_before_it_loads_a_model_is_refused(overrides, message, config):
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["check", str(config), *overrides, "--no-memory"], catch_exceptions=False)


def test_a_row_of_a_local_file_that_train_could_not_read_is_refused(tmp_path, config):
    file = tmp_path / "mine.csv"
    file.write_text("text,answer\n1+1,2\n1+2,3,4\n")
    overrides = [f"data.train={{dataset: csv, path: '{file}'}}", "--no-memory"]
    with pytest.raises(UserError, match=r"mine\.csv:3: 3 fields"):
        CliRunner().invoke(app, ["check", str(config), *overrides], catch_exceptions=False)


@pytest.mark.parametrize("machine", [["--gpus", "2"], ["--gpu", "h100-80"]])
def test_what_this_machine_lacks_does_not_count_for_another(machine, config):
    for setting in ("rollout.backend=vllm_server", NO_PATH, "model.source=models/nowhere", "output=/proc/x"):
        done = CliRunner().invoke(app, ["check", str(config), setting, *machine, "--no-memory"])
        assert done.exit_code == 0, (setting, done.exception)
    # What no machine could train is refused still.
    for setting in ("trainer.nope=1", "data.train.path=nope.csv"):
        assert isinstance(CliRunner().invoke(app, ["check", str(config), setting, *machine]).exception, UserError)


# --- --resolved -------------------------------------------------------------------------------------------------------


@pytest.fixture
def resolved(tmp_path, monkeypatch):
    """The rows of ``check --resolved`` of a config that extends two others, under overrides, by their keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(
        "optimizer: {lr: 0.1, clip_norm: 0.5}\nrewards: [{name: exact_answer, weight: 2}]\n"
        "data: {eval: {a: {limit: 3}, b: {limit: 4}}}\n"
    )
    (tmp_path / "second.yaml").write_text("optimizer: {lr: 0.2}\nrewards: [{name: exact_answer}]\n")
    (tmp_path / "run.yaml").write_text(
        "extends: [first.yaml, second.yaml]\nname: run-${seed}\nlag: {mode: async, max_steps: 1, in_flight: true}\n"
        "kl: [{estimator: k1, beta: 0.1}]\ndata: {eval: {b: null}}\n"
    )

    def rows(*overrides):
        words = ["check", "run.yaml", *overrides, "--resolved", "--format", "json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        return {row["key"]: (row["value"], row["origin"]) for row in json.loads(result.stdout)}

    return rows


def test_each_value_says_where_it_comes_from(resolved):
    rows = resolved("seed=3", "kl.0.beta=0.2", "model.lora.rank=2")
    assert rows["optimizer.lr"] == (0.2, "second.yaml")
    assert rows["optimizer.clip_norm"] == (0.5, "first.yaml")
    assert rows["kl.0.estimator"] == ("k1", "run.yaml")
    assert rows["kl.0.beta"] == (0.2, "command line")
    assert rows["model.lora.rank"] == (2, "command line")
    assert rows["model.lora.alpha"] == (16.0, "default")
    assert rows["train.steps"] == (100, "default")
    assert rows["data.eval.a.limit"] == (3, "first.yaml")
    assert "data.eval.b.limit" not in rows


def test_an_interpolation_says_so(resolved):
    assert resolved("seed=3")["name"] == ("run-3", "run.yaml, run-${seed}")


def test_an_item_of_a_list_that_was_replaced_is_not_named_as_an_origin(resolved):
    assert resolved()["rewards.0.weight"] == (1.0, "default")


def test_the_resolved_config_is_read_back_to_the_same_config(tmp_path):
    overrides = ["kl=grpo", f"data.prompt.system='a long text: # with a hash, {'and more words ' * 9}'"]
    result = CliRunner().invoke(app, ["check", str(TINY), *overrides, "--resolved"])
    assert result.exit_code == 0, result.output
    (tmp_path / "resolved.yaml").write_text(result.stdout)
    assert load_config(tmp_path / "resolved.yaml") == load_config(TINY, overrides)
    comments = [line.rpartition("  # ")[2] for line in result.stdout.splitlines() if "  # " in line]
    assert len(comments) == len(flatten(to_plain(load_config(TINY, overrides))))
    assert set(comments) == {"default", "command line", str(TINY)}
    assert comments.count("command line") == 2


def test_the_values_of_a_config_that_cannot_run_are_printed_before_it_is_refused():
    result = CliRunner().invoke(app, ["check", str(TINY), "rewards.0.options={nothing: 3}", "--resolved"])
    assert "nothing: 3" in result.stdout
    assert isinstance(result.exception, UserError)


def resolved_text(folder, name, *overrides):
    result = CliRunner().invoke(app, ["check", str(folder / name), *overrides, "--resolved"])
    if isinstance(result.exception, UserError):
        return str(result.exception)
    assert result.exception is None, result.exception
    return result.output


@pytest.mark.parametrize(
    "text",
    [
        "extends: tiny.yaml",
        "extends: [tiny.yaml]",
        "extends: [tiny.yaml, empty.yaml]",
        "extends: [comments.yaml, tiny.yaml]",
        "extends: second.yaml",
    ],
)
def test_a_config_without_keys_of_its_own_has_the_origins_of_what_it_extends(tmp_path, text):
    shutil.copy(TINY, tmp_path / "tiny.yaml")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "comments.yaml").write_text("# nothing\n")
    (tmp_path / "second.yaml").write_text("extends: tiny.yaml\n")
    (tmp_path / "c.yaml").write_text(text + "\n")
    output = resolved_text(tmp_path, "c.yaml")
    assert yaml.safe_load(output) == to_plain(load_config(TINY))
    (line,) = (line for line in output.splitlines() if line.startswith("name: "))
    assert line.endswith(f"# {tmp_path / 'tiny.yaml'}")


@pytest.mark.parametrize("text", ["extends: empty.yaml", "extends: []", "extends: list.yaml", "", "# nothing", "- 1"])
def test_a_config_that_extends_nothing_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "c.yaml").write_text(text + "\n")
    assert re.search("is empty; a run needs|holds a list", resolved_text(tmp_path, "c.yaml"))


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\x0b"])
def test_names_and_values_with_line_ends_leave_the_resolved_config_what_it_is(tmp_path, end):
    name = f"a{end}b: [\x1b[31m.yaml"
    shutil.copy(TINY, tmp_path / name)
    prompt = f"data.prompt.system={json.dumps(f'one{end}two: three')}"
    output = resolved_text(tmp_path, name, prompt)
    assert "\x1b" not in output
    assert yaml.safe_load(output) == to_plain(load_config(TINY, [prompt]))
