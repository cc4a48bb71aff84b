"""The symptom pages: causes, a check that prints what the page shows, and fixes that do what the page says."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from kl_comedy import explain
from kl_comedy.models.pocket import pocket_folder, recipe_from_options
from typed_commands import examples_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "symptoms"
SYMPTOMS = sorted(page.stem for page in FOLDER.glob("*.md") if page.stem not in ("index", "threads"))
CODES = {
    "kl-comedy check quickstart rollout.top_p=0.9": 2,
    "kl-comedy conformance examples/conformance/kl_losses.py:returns_over_tools --claims sequence_reverse": 1,
}
"""Commands that end with another exit code than 0, as their page says."""
MEASURE = "kl-comedy evaluate mine.yaml model.source=models/policy eval.reference=models/reference eval.temperature=1"
"""Typed by a slow test: it samples from models."""


def page(name):
    return (FOLDER / f"{name}.md").read_text()


def section(name, title):
    return page(name).split(f"## {title}\n")[1].split("\n## ")[0]


# --- what a page has ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_page_has_what_is_seen_causes_a_check_and_a_fix(name):
    text = page(name)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Causes", "Check", "Fix"]
    seen = text.split("## Causes")[0].splitlines()[1:]
    assert "".join(seen).strip(), "the sentence under the title"
    assert len(re.findall(r"^\d\. \*\*", section(name, "Causes"), re.MULTILINE)) >= 3
    assert "| framework |" in section(name, "Fix")
    in_check = [command for command in examples_of(FOLDER / f"{name}.md") if command.text in section(name, "Check")]
    assert in_check != []


@pytest.mark.parametrize("name", [*SYMPTOMS, "index", "threads"])
def test_a_page_is_in_the_menu_and_the_list(name):
    assert f"symptoms/{name}.md" in (ROOT / "mkdocs.yml").read_text()
    if name != "index":
        assert f"({name}.md)" in page("index")


# --- commands -----------------------------------------------------------------------------------------------------
CONSOLE = []
for symptom in SYMPTOMS:
    for command, shown in re.findall(r"^```console\n\$ (kl-comedy .*?)\n(.*?)^```$", page(symptom), re.M | re.S):
        CONSOLE.append((symptom, command, shown))


def test_every_command_of_a_block_is_typed_here():
    in_blocks = {example.text for name in SYMPTOMS for example in examples_of(FOLDER / f"{name}.md")}
    assert in_blocks == {command for _, command, _ in CONSOLE} | {MEASURE}


@pytest.mark.parametrize(("symptom", "command", "shown"), CONSOLE, ids=[command[10:60] for _, command, _ in CONSOLE])
def test_a_command_prints_what_its_page_shows(kl_comedy, monkeypatch, symptom, command, shown):
    """In this order; `...` stands for lines that are left out."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(ROOT)
    code, out, err = kl_comedy(*shlex.split(command)[1:])
    expected_code = CODES.get(command, 0)
    assert code == expected_code, err
    if expected_code != 0:
        assert f"exit code {expected_code}" in section(symptom, "Check")
    printed = [line.rstrip() for line in (out + err).splitlines()]
    position = 0
    for line in shown.splitlines():
        if line != "...":
            assert line in printed[position:], line
            position = printed.index(line, position) + 1


@pytest.mark.slow
def test_the_exact_kl_between_two_folders_is_measured(kl_comedy, tmp_path, monkeypatch):
    """0 for a copy; above 0 for a model whose weights differ. The models and the config stand for the reader's."""
    from safetensors.torch import load_file, save_file

    tiny = pocket_folder(recipe_from_options({"preset": "tiny"}))
    for name in ("policy", "reference"):
        shutil.copytree(tiny, tmp_path / "models" / name)
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["data"]["eval"]["heldout"]["limit"] = 8
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def measured():
        code, out, err = kl_comedy(*shlex.split(MEASURE)[1:])
        assert code == 0, err
        return float(re.search(r"KL, nats/completion\D+([\d.]+)", out)[1])

    assert measured() == 0
    (tmp_path / "models" / "policy" / "checksums.json").unlink()  # as the message says where a change is one's own
    (weights,) = (tmp_path / "models" / "policy").glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor * 1.1 for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    assert measured() > 0.01


# --- fixes --------------------------------------------------------------------------------------------------------
SET = [
    ("negative", "`actor.kl_loss_type=k3+`", "verl:use_kl_loss=true,kl_loss_type=k3+"),
    (
        "negative",
        "`--kl-loss-type k3 --use-unbiased-kl`",
        "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k3,use_unbiased_kl=true",
    ),
    (
        "negative",
        "`--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.unbiased_gradient`",
        "openrlhf:use_loss=true,kl_estimator=k3,unbiased_gradient=true",
    ),
    ("negative", "`kl_loss_mode=mse_kl`", "tunix:kl_loss_mode=mse_kl"),
    ("nan", "slime `--kl-loss-type k2`", "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k2"),
    ("spikes", "`--algo.kl.use_loss --algo.kl.unbiased_gradient`", "openrlhf:use_loss=true,unbiased_gradient=true"),
    ("spikes", "| TRL | the default (`use_bias_correction_kl`)", "trl:beta=0.04"),
    ("spikes", "| NeMo-RL | the default |", "nemo-rl:"),
    ("does_nothing", "`use_kl_in_reward=false`", "nemo-rl:use_kl_in_reward=false"),
]
"""Page, what it says to set, and the flags of `explain`: the KL in the loss has the gradient of the reverse KL."""

NOTHING = [
    "trl:",
    "verl:use_kl_in_reward=true,adv_estimator=gdpo",
    "slime:use_kl_loss=true",
    "slime:kl_coef=0.01,advantage_estimator=grpo",
    "slime:kl_coef=0.01,advantage_estimator=gspo",
    "slime:kl_coef=0.01,advantage_estimator=cispo",
    "nemo-rl:use_kl_in_reward=true",
    "nemo-rl:use_kl_in_reward=true,adv_estimator=gdpo",
    "areal:",
]
ZERO = ["verl:use_kl_loss=true,kl_loss_type=k1", "slime:use_kl_loss=true,kl_loss_coef=0.01", "tunix:"]


@pytest.mark.parametrize(("name", "says", "flags"), SET, ids=[flags for _, _, flags in SET])
def test_what_a_page_says_to_set_has_the_gradient_of_the_reverse_kl(name, says, flags):
    assert says in section(name, "Fix")
    assert explain(flags).certificates["on_policy"].target == "token_reverse"


@pytest.mark.parametrize("flags", NOTHING)
def test_what_a_page_calls_without_effect_has_no_kl_term(flags):
    """Of AReaL's it is a bonus that no term of ours has."""
    assert not explain(flags).terms


@pytest.mark.parametrize("flags", ZERO)
def test_k1_in_the_loss_has_a_gradient_of_mean_zero(flags):
    assert explain(flags).certificates["on_policy"].target == "zero"


# --- threads ------------------------------------------------------------------------------------------------------
def test_each_of_25_threads_has_its_answer_or_says_that_there_is_none():
    rows = [line.strip("|").split(" | ") for line in page("threads").splitlines() if re.match(r"\| \d", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 26))
    counts = {"answered": 0, "partly": 0, "not answered": 0}
    for _, _, threads, answer in rows:
        assert re.search(r"\[#\d+\]\(https://github\.com/[\w.-]+/[\w.-]+/issues/\d+\)", threads)
        kind = re.match(r"\W*(partly|not answered)", answer)
        counts[kind[1] if kind else "answered"] += 1
        if kind is None or kind[1] == "partly":
            assert re.search(r"\]\([\w./#-]+\)|`kl-comedy |`explain`|register", answer), answer
    tally = "Answered {answered}, partly {partly}, not answered {not answered}.".format(**counts)
    assert tally in page("threads")
