"""Every command that README, a page or ``--help`` shows is run as it is typed, and every option once.

The commands run in a copy of the checkout's configs whose *sizes* are small (two updates, two cells of a grid); the
words are the page's. Without this test a documented command may crash: bare ``kl-comedy certify`` did.
"""

import itertools
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import yaml

from commands import Command
from kl_comedy.models.pocket import pocket_folder, recipe_from_options
from typed_commands import (
    PAGES,
    RESULT_PAGES,
    ROOT,
    Typed,
    click_commands,
    command_of,
    examples_of,
    examples_of_help,
    mentions_of,
    options_of,
)

NOT_RUN = {
    "kl-comedy train hack_pocket 'rewards=[{name: model, options: {folder: proxy}}]' kl=none name=learned": (
        "examples/fit_reward_model.py writes the classifier first"
    ),
    "kl-comedy train qwen2.5_0.5b_gsm8k resume=auto": "the model comes from a hub",
    "kl-comedy train on_policy_math_qwen resume=auto": "the model comes from a hub; needs 8 GPUs",
    "kl-comedy evaluate runs/RUN --suite gsm8k,math500 --data-root DATA eval.samples=8 eval.temperature=0.7": (
        "14,552 completions take hours; OTHERS has the same with --limit"
    ),
    "kl-comedy evaluate runs/RUN --suite gsm8k,math500 --data-root data eval.samples=8 eval.temperature=0.7": (
        "as above"
    ),
    "kl-comedy evaluate models/MODEL --suite mmlu_college_physics_likelihood --format json": (
        "needs MMLU; tests/evaluation/test_choices_in_training.py evaluates by likelihood"
    ),
    "kl-comedy reproduce k3-loss-94e1f8e --uri results/study/export.parquet --tolerance 'eval/heldout/reward=0.1'": (
        "trains for minutes; OTHERS reproduces a small run"
    ),
    "kl-comedy reproduce k3-loss-94e1 --uri results/study/export.parquet --tolerance 'eval/*/reward=0.1'": "as above",
    "kl-comedy results verify results": "minutes; tests/results/test_verify.py runs it",
    "kl-comedy audit CONFIG": "half a minute; the same page has it with --updates and --samples",
    "kl-comedy train CONFIG train.strategy=fsdp train.devices=8": ("as with ddp; tests/training/test_distributed.py"),
}
"""Examples that are not run, each with the reason."""

WRITTEN_FOR = {
    "CONFIG": "configs/quickstart.yaml",
    "GRID": "configs/sweeps/pocket_beta.yaml",
    "PROFILE": "cpu_test",
    "SWEEP": "pocket_beta",
    "N": "2",
}
"""What a reader writes in the place of a word in capitals."""

FEWER_PROCESSES = {"train.devices=4": "train.devices=2", "train.devices=8": "train.devices=2"}
"""In a run of this machine: more processes on two cores would prove nothing that two do not."""

LESS_WORK = {
    ("--updates", "40"): "8",
    ("--updates", "20"): "8",
    ("--samples", "4096"): "256",
    ("--samples", "2048"): "256",
}
"""Options of ``audit`` and their values, in the place of what takes half a minute; what an audit measures from so few
samples is tested in tests/audit/test_audit.py."""

READ_ONLY = ("certify", "check", "conformance", "doctor", "explain", "list", "plan")
"""Commands that answer and leave nothing: one that stands on several pages is typed on the first of them."""

ALONE = ("kl-comedy sweep quickstart seed=0,1 kl.0.beta=0.01,0.03 --local 2",)
"""Commands that leave what no other one of their pages reads: typed once too."""

SMALL = {
    "train": {"steps": 2, "eval_every": 1, "checkpoint_every": 1, "samples_every": 2},
    "rollout": {"prompts_per_batch": 4, "group_size": 4, "max_new_tokens": 24},
    "eval": {"samples": 1},
    "optimizer": {"lr": 1.0e-3},
}
SMALL_MODEL = {"source": "models/tiny"}
SMALL_DATA = {
    "train": {"dataset": "pocket", "split": "train", "limit": 256, "options": {"digits": 1}},
    "eval": {"heldout": {"dataset": "pocket", "split": "heldout", "limit": 8, "options": {"digits": 1}}},
    "prompt": {"template": "plain"},
}
SUITE = {
    "name": "sums",
    "data": {"dataset": "hub", "name": "nobody/sums", "split": "test", "fields": {"text": "sum", "answer": "total"}},
    "file": {"path": "sums.jsonl", "fields": {"text": "sum", "answer": "total"}},
    "template": "plain",
    "reward": {"name": "exact_answer"},
    "answer": "number",
    "max_new_tokens": 24,
}
POCKET_CONFIGS = (
    "quickstart",
    "hack_pocket",
    "record_pocket",
    "replay_pocket",
    "dpo_pocket",
    "async_pocket",
    "tool_pocket",
)
GRIDS = {
    "configs/sweeps/pocket_beta.yaml": {"kl.0.estimator": ["k1", "k2", "k3"]},
    "configs/evidence/core.yaml": {"optimizer.lr": [1.0e-4, 3.0e-4]},
}
LAUNCH_SCRIPT = "python -m verl.trainer.main_ppo algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.01\n"
FAKE_SLURM = {
    "sbatch": "echo '1;cluster'",
    "squeue": "true",
    "sacct": "true",
    "scancel": "true",
}
"""Stand-ins, so that what is submitted can be typed anywhere; tests/slurm submits to a real controller."""

OTHERS = Path(__file__).with_name("other_commands.txt").read_text()
"""Commands with the options that neither a page nor a help text shows, and the bare ones."""

FOUR_CELLS = "--help"
"""Where the fourth cell of the sweep is typed."""

WHOLE_PAGES = {
    "docs/your_own.md": "its commands need the files that it writes; test_your_own.py runs all of it",
    "CONTRIBUTING.md": "tests/test_plugin_walk.py types its commands and reads what they answer",
    **{
        str(page.relative_to(ROOT)): "test_symptoms.py types its commands and compares what they print"
        for page in (ROOT / "docs" / "symptoms").glob("*.md")
    },
}
"""Pages whose commands are not typed one by one, each with the reason."""

CODES = {
    "kl-comedy conformance verl": 2,
    "kl-comedy export runs/RUN policy-best --push-to-hub my-policy": 2,
    "kl-comedy export runs/RUN exported --push-to-hub my-policy --public": 2,
}
"""Commands that end with another exit code than 0, by their text: there is no hub, or no token for it,
and no verl among the pins."""


def typed_in_text(text: str) -> list[Typed]:
    return [Typed("OTHERS", line.strip()) for line in text.strip().splitlines()]


PAGES_WITH_EXAMPLES = {str(page.relative_to(ROOT)): examples_of(page) for page in PAGES if examples_of(page)}
SESSIONS = {**PAGES_WITH_EXAMPLES, "--help": examples_of_help(), "OTHERS": typed_in_text(OTHERS)}
"""What is typed one after the other in one folder."""
EXAMPLES = [example for session in SESSIONS.values() for example in session]


def test_the_examples_that_are_not_run_exist():
    texts = {example.text for example in EXAMPLES}
    assert sorted(set(NOT_RUN) - texts) == []


def test_every_example_calls_a_command_with_options_that_it_has():
    examples_of_results = [example for page in RESULT_PAGES for example in examples_of(page)]
    wrong = []
    for example in [*EXAMPLES, *examples_of_results]:
        words = example.words[1:]
        if words[0] in ("--help", "--version"):
            continue
        name = command_of(words)
        if name is None:
            wrong.append(f"{example.place}: {example.text} (no such command)")
            continue
        unknown = options_of(words) - all_options(name)
        if unknown:
            wrong.append(f"{example.place}: {example.text} (no option {', '.join(sorted(unknown))})")
    assert wrong == []


def test_every_command_named_in_a_sentence_exists():
    commands = click_commands()
    groups = {name.split()[0] for name in commands}
    wrong = []
    for page in [*PAGES, *RESULT_PAGES]:
        for mention in mentions_of(page):
            words = mention.text.split()[1:]
            name = command_of(words)
            if words[0] in groups and name is None and len(words) == 1:
                continue  # a group by its name alone, as `kl-comedy results`
            if words[0].startswith("--"):
                continue
            if name is None or options_of(words) - all_options(name):
                wrong.append(f"{mention.place}: {mention.text}")
    assert wrong == []


def test_every_option_of_every_command_is_typed_somewhere():
    typed: dict[str, set[str]] = {name: set() for name in click_commands()}
    for example in EXAMPLES:
        name = command_of(example.words[1:])
        if name is not None and example.text not in NOT_RUN:
            typed[name] |= options_of(example.words)
    missing = {}
    for name, command in click_commands().items():
        # A hidden option is one that is only refused, with its reason.
        shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        absent = {parameter.opts[0] for parameter in shown if parameter.opts[0].startswith("--")}
        absent -= {"--help"} | typed[name]
        if absent:
            missing[name] = sorted(absent)
    assert missing == {}


def all_options(name: str) -> set[str]:
    """Every spelling of the options of a command."""
    options = {"--help"}
    for parameter in click_commands()[name].params:
        options.update(parameter.opts)
        options.update(parameter.secondary_opts)
    return options


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with the configs at small sizes, a plugin, a launch script, a run and a sweep, as the pages assume."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "examples", "slurm", "results"):
        shutil.copytree(ROOT / name, folder / name)
    for name in POCKET_CONFIGS:
        make_small(folder / "configs" / f"{name}.yaml")
    for name, axes in GRIDS.items():
        make_grid_small(folder / name, axes)
    make_small(folder / "configs" / "evidence" / "base.yaml")

    (folder / "my_parts.py").write_text("\n".join(first_blocks_of_guides()))
    (folder / "run_grpo.sh").write_text(LAUNCH_SCRIPT)
    shutil.copytree(pocket_folder(recipe_from_options({"preset": "tiny"})), folder / "models" / "tiny")
    (folder / "sums.yaml").write_text(yaml.safe_dump(SUITE))
    (folder / "data").mkdir()
    (folder / "data" / "sums.jsonl").write_text('{"sum": "1+2=", "total": "3"}\n{"sum": "2+2=", "total": "4"}\n')
    (folder / "bin").mkdir()
    for name, line in FAKE_SLURM.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)

    run_typed("kl-comedy init estimator my_estimator.py", folder)
    run_typed("kl-comedy train configs/record_pocket.yaml", folder)
    (recorded,) = (folder / "runs").glob("record_pocket-*")
    recorded.rename(folder / "runs" / "RUN")
    run_typed("kl-comedy train configs/quickstart.yaml tracking.experiment=study", folder)
    run_typed("kl-comedy sweep configs/sweeps/pocket_beta.yaml --local 2 --name first", folder)
    return folder


@pytest.fixture(scope="module")
def answered():
    """The texts of commands of :data:`READ_ONLY` that a page before has typed."""
    return set()


def first_blocks_of_guides() -> list[str]:
    """The first Python block of each guide: what a reader puts into a file."""
    blocks = []
    for guide in re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE):
        block = re.search(r"^```python\n(.*?)^```$", guide, flags=re.MULTILINE | re.DOTALL)
        if block is not None:
            blocks.append(block.group(1))
    return blocks


def make_small(config: Path) -> None:
    """Write the config anew with the sizes of :data:`SMALL`."""
    content = yaml.safe_load(config.read_text())
    for section, sizes in SMALL.items():
        content[section] = {**content.get(section, {}), **sizes}
    if "extends" not in content:
        content["model"] = SMALL_MODEL
    if "data" in content:
        content["data"] = SMALL_DATA
    if "environment" in content:
        # A turn may not be longer than a whole completion, which is short now.
        content["environment"]["turn_tokens"] = None
    config.write_text(yaml.safe_dump(content))


def make_grid_small(file: Path, axes: dict[str, list]) -> None:
    """Write the grid anew with other axes and one seed."""
    grid = yaml.safe_load(file.read_text())
    grid = {**grid, "grid": axes, "seeds": 1}
    grid.pop("exclude", None)
    file.write_text(yaml.safe_dump(grid))


def run_typed(text: str, folder: Path) -> None:
    """Run a command in ``folder``, as typed.

    Raises :class:`AssertionError` where it fails or prints a traceback.
    """
    words = [WRITTEN_FOR.get(word, word) for word in Typed("", text).words[1:]]
    if "NAME_OF_A_RUN" in words:
        (name,) = [run.name for run in (folder / "runs").glob("quickstart-*")]
        words[words.index("NAME_OF_A_RUN")] = name
    if words[0] == "train":
        words = [FEWER_PROCESSES.get(word, word) for word in words]
    if words[0] == "audit":
        words = [words[0], *(LESS_WORK.get(pair, pair[1]) for pair in itertools.pairwise(words))]
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "COLUMNS": "100"}
    # The names of configs stand for the small ones in the folder.
    # Cells are forks of the command; in real processes they are in tests/slurm and tests/training/test_stop_phases.py.
    modules = ["small_configs", "forked_servers"]
    command = Command(*words, cwd=folder, env=environment, modules=modules)
    start = time.monotonic()
    code = command.wait()
    print(f"{time.monotonic() - start:6.1f} s  exit {code}  {text[:150]}", flush=True)  # pytest shows it on a failure
    if code != CODES.get(text, 0) or "Traceback" in command.output:
        raise AssertionError(f"{text}\n  exit code {code}: {command.output[-700:]}")


@pytest.mark.slow
@pytest.mark.parametrize("session", [session for session in SESSIONS if session not in WHOLE_PAGES])
def test_what_a_page_shows_runs_as_it_is_typed(session, checkout, answered, tmp_path):
    """One after the other, in the order of the page, in a folder of the page's own."""
    folder = tmp_path / "checkout"
    shutil.copytree(checkout, folder)
    if session != FOUR_CELLS:
        # Two cells: one of the grid, and that without KL.
        make_grid_small(folder / "configs/sweeps/pocket_beta.yaml", {"kl.0.estimator": ["k1"]})
    failures = []
    for example in SESSIONS[session]:
        if example.text in NOT_RUN or example.text in answered:
            continue
        if example.words[1] in READ_ONLY or example.text in ALONE:
            answered.add(example.text)
        try:
            run_typed(example.text, folder)
        except (AssertionError, TimeoutError) as error:
            failures.append(str(error))
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)
