"""`kl-comedy certify`: what it prints in each format, what it refuses, and when it exits 1."""

import csv
import io
import json
import re
import sys

import pytest

from kl_comedy.plugins import PLUGIN_FILES
from kl_comedy.registry import CORRECTIONS, ESTIMATORS, POLICY_CORRECTIONS, RECIPES

FIXED = {"name", "terms", "regime", "target", "relative_bias", "cosine", "variance", "verdict"}
TARGETS = {"sequence_reverse", "token_reverse", "token_forward", "sequence_forward", "zero"}


def built_in(registry):
    """The names that the package itself registers: plugins of other test files may be loaded too."""
    return [entry.name for entry in registry if entry.origin.startswith("kl_comedy.")]


@pytest.fixture
def certify(kl_comedy, monkeypatch, tmp_path):
    """Run the command in a folder of its own: exit code, stdout, stderr. What plugins register ends with the test."""
    for registry in (ESTIMATORS, CORRECTIONS, POLICY_CORRECTIONS):
        monkeypatch.setattr(registry, "_entries", {name: registry.get(name) for name in built_in(registry)})
    monkeypatch.chdir(tmp_path)
    modules_before = set(sys.modules)
    plugins_before = dict(PLUGIN_FILES)

    def call(*arguments):
        code, out, err = kl_comedy("certify", *arguments)
        assert "Traceback" not in err
        return code, out, err

    yield call
    for name in set(sys.modules) - modules_before:
        if name.startswith("kl_comedy_plugin_"):
            del sys.modules[name]
    PLUGIN_FILES.clear()
    PLUGIN_FILES.update(plugins_before)


def rows_of(certify, *arguments, code=0):
    """The rows of ``--format json``."""
    exit_code, out, err = certify(*arguments, "--format", "json")
    assert exit_code == code, err
    return json.loads(out)


# --- what it prints -----------------------------------------------------------------------------------------------
def test_json_has_the_fixed_keys_for_each_recipe_and_regime(certify):
    rows = rows_of(certify, "grpo", "rb/per_decision")
    assert [(row["name"], row["regime"], row["target"]) for row in rows] == [
        ("grpo", "on_policy", "token_forward"),
        ("grpo", "off_policy", None),
        ("grpo", "mixed", None),
        ("rb/per_decision", "on_policy", "sequence_reverse"),
        ("rb/per_decision", "off_policy", "sequence_reverse"),
        ("rb/per_decision", "mixed", "sequence_reverse"),
    ]
    for row in rows:
        assert set(row) >= FIXED
        assert set(row["relative_bias"]) == TARGETS
        assert set(row["cosine"]) == TARGETS
        assert row["target"] in TARGETS | {None}
        assert row["variance"] > 0
        assert isinstance(row["verdict"], str)
        assert row["in_training"] is None
        assert row["checked"]["log_ratios"] == [-100, 100]
        assert set(row["checked"]["estimators"]) == {"k3", "exact"}
    assert rows[0]["terms"] == [{"estimator": "k3", "placement": "loss", "beta": 0.04}]


def test_without_names_every_recipe_is_certified_and_every_part_checked(certify):
    rows = rows_of(certify, "--regime", "on_policy")
    assert [row["name"] for row in rows] == RECIPES.names()
    assert set(rows[0]["checked"]["estimators"]) == set(ESTIMATORS.names())
    assert set(rows[0]["checked"]["corrections"]) == set(CORRECTIONS.names())


TWO_RECIPES = ("comedy/k1_in_loss", "trl/default", "--regime", "on_policy")


@pytest.mark.parametrize("format", ["table", "csv", "latex", "markdown"])
def test_each_format_holds_the_verdicts(certify, format):
    _, out, _ = certify(*TWO_RECIPES, "--format", format)
    assert "zero expected gradient" in out
    assert "token" in out
    if format == "markdown":
        assert out.splitlines()[1].startswith("|")
    if format == "latex":
        assert "tabular" in out


def test_csv_has_a_column_per_bias_and_the_terms_as_json(certify):
    _, out, _ = certify(*TWO_RECIPES, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["name"] for row in rows] == ["comedy/k1_in_loss", "trl/default"]
    assert float(rows[1]["relative_bias_token_reverse"]) < 1e-9
    assert float(rows[1]["relative_bias_sequence_reverse"]) > 1e-9
    assert json.loads(rows[1]["terms"])[0]["correction"] == "token"


def test_a_plot_is_written_and_mentioned_on_stderr(certify, tmp_path):
    code, out, err = certify("grpo", "--regime", "on_policy", "--format", "json", "--plot", "figures/plane.png")
    assert code == 0
    assert json.loads(out)
    assert "figure: figures/plane.png" in err
    assert (tmp_path / "figures" / "plane.png").read_bytes().startswith(b"\x89PNG")


def test_a_config_that_truncates_has_a_line_on_what_its_kl_is(certify, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "data: {train: {dataset: pocket}}\nrollout: {truncation: {top_k: 20}}\nkl: [{estimator: k3, placement: loss}]\n"
    )
    code, _, err = certify("run.yaml", "--regime", "on_policy")
    assert code == 0
    (line,) = [line for line in err.splitlines() if line.startswith("run.yaml: rollout.truncation")]
    assert "(top_p 1, top_k 20, min_p 0): the policy is renormalized over the tokens that the sampler kept" in line
    assert "kl.0 is then on-policy token_forward: " in line
    mass, missing = re.search(r"keep (0\.\d+) of the policy's mass.* is (\d\.\d+) nats", line).groups()
    assert 0.2 < float(mass) < 1
    assert float(missing) > 0
    (row,) = rows_of(certify, "run.yaml", "--regime", "on_policy")
    assert f"run.yaml: {row['truncation']}" == line
    (tmp_path / "whole.yaml").write_text("data: {train: {dataset: pocket}}\nkl: [{estimator: k3, placement: loss}]\n")
    assert "truncation" not in rows_of(certify, "whole.yaml", "--regime", "on_policy")[0]


def test_a_term_a_list_and_a_config(certify, tmp_path):
    (tmp_path / "two.yaml").write_text("- {estimator: k3, placement: reward}\n- {estimator: k3, placement: loss}\n")
    (tmp_path / "run.yaml").write_text(
        "data: {train: {dataset: pocket}}\nrollout: {group_size: 16}\nalgorithm: {advantage: dr_grpo}\n"
        "kl: [{estimator: k1, placement: reward, credit: total, baseline: before, beta: 0.1}]\n"
    )
    term = "{estimator: exact, placement: loss}"
    rows = rows_of(certify, "two.yaml", "run.yaml", "--term", term, "--regime", "on_policy")
    assert len(rows) == 3
    of_list, of_config, of_term = rows
    assert of_list["name"] == "two.yaml"
    assert of_list["target"] == "sequence_reverse"
    assert of_list["in_training"] is None
    assert of_config["name"] == "run.yaml"
    assert of_config["target"] == "sequence_reverse"
    assert of_config["in_training"]["strength"] == pytest.approx(15 / 16), "1 - 1/G of the group's mean"
    assert of_term["target"] == "token_reverse"


def test_the_cells_of_an_estimator(certify):
    rows = rows_of(certify, "--estimator", "exact", "--regime", "off_policy")
    assert len(rows) > 10
    assert estimators_of(rows) == {"exact"}


def estimators_of(rows):
    names = set()
    for row in rows:
        names.update(term["estimator"] for term in row["terms"])
    return names


@pytest.mark.parametrize("full", [False, True], ids=["main rows", "all rows"])
def test_a_table_fits_the_terminal_and_ends_with_what_was_checked(certify, tmp_path, monkeypatch, full):
    monkeypatch.setenv("COLUMNS", "80")
    plugin = HEAD.format(claims="('nonnegative',)", body="return shift**2 * log_ratio.abs()")
    (tmp_path / "mine.py").write_text(plugin.replace("(log_ratio)", "(log_ratio, shift=2.0)"))
    arguments = ["--plugin", "mine.py", "--estimator", "mine", "--regime", "off_policy", "--seed", "7"]
    if full:
        arguments.append("--full")
    code, out, _ = certify(*arguments)
    lines = out.splitlines()
    text = " ".join(out.split())
    assert code == 0
    assert max(map(len, lines)) <= 80
    assert "noise: the variance of one completion's gradient over" in text
    assert "checked (seed 7): estimators at 20,000 log-ratios from -100 to 100 nats in float64 and float32" in text
    assert "mine with shift = " in text
    assert "gradients enumerated in float64 over 4 and 8 tokens" in text
    assert "and in 4 drawn settings per regime (vocabulary " in text
    assert "largest error of a target" in text
    if full:
        assert "rows: the main ones and the failures" not in text
        assert len(lines) > 80
    else:
        assert "rows: the main ones and the failures" in text
        assert len(lines) < 40


def test_the_terms_of_a_plugin_have_one_line_each_and_the_small_print_once(certify, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    plugin = HEAD.format(claims="('nonnegative',)", body="return 0.25 * log_ratio**2")
    (tmp_path / "mine.py").write_text(plugin)
    code, out, err = certify("--plugin", "mine.py", "--regime", "on_policy", "--seed", "7")
    assert code == 0, err
    head, _, *lines = out.splitlines()
    assert head.split() == ["name", "regime", "optimizes", "bias", "cosine", "noise"]
    rows = lines[: lines.index("")]
    # In the reward and in the loss, each without and with the ratio of the prefix.
    assert [row.partition("  ")[0] for row in rows] == [
        "mine_reverse_token in reward to_go",
        "mine_reverse_token in loss",
        "mine_reverse_token in reward to_go x prefix",
        "mine_reverse_token in loss x prefix",
    ]
    assert max(map(len, out.splitlines())) <= 100
    text = " ".join(out.split())
    assert text.count("the least noisy unbiased term") == 1
    assert text.count("the gradient of no KL") == 1


def test_the_pull_of_each_configuration_has_a_line_with_its_samples(certify):
    code, out, err = certify("grpo", "comedy/k3_in_reward", "--seed", "0")
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("pull of ")]
    assert lines == [
        "pull of grpo (force on a token by its log-ratio), on_policy: above the reference at most beta, below it at "
        "most beta; off_policy, mixed: above the reference at most beta, below it exponential",
        "pull of comedy/k3_in_reward (force on a token by its log-ratio), on_policy: above the reference linear, below "
        "it at most beta away; off_policy, mixed: above the reference linear, below it exponential away",
    ]
    rows = rows_of(certify, "grpo", "--regime", "off_policy", "--seed", "0")
    assert [row["pull"] for row in rows] == ["above the reference at most beta, below it exponential"]
    # Of two terms, and of one that reads whole distributions, no force on a token is known.
    both = rows_of(certify, "comedy/k3_both", "rb/per_decision", "--regime", "on_policy", "--seed", "0")
    assert ["pull" in row for row in both] == [False, False]


def test_ranges_come_with_the_vocabulary_and_the_distance_of_their_policies(certify):
    arguments = ("grpo", "--regime", "off_policy", "--range", "--seed", "0")
    (row,) = rows_of(certify, *arguments)
    assert [of_age["age"] for of_age in row["range"]] == [None, 1, 4, 10]
    figures = row["range"][0]
    assert (figures["policies"], figures["vocabulary"], figures["steps"]) == (50, [4, 8], 3)
    for name in ("error", "strength", "noise", "kl_per_prefix"):
        least, median, largest = figures[name]
        assert least < median < largest
    code, out, err = certify(*arguments)
    assert code == 0, err
    head, _, line, *rest = out.splitlines()
    assert head.split() == ["name", "regime", "optimizes", "error", "strength", "noise"]
    least, median, largest = figures["error"]
    assert f"{median:.2g} [{least:.2g}, {largest:.2g}]" in line
    assert "%" not in line
    nearest, _, farthest = figures["kl_per_prefix"]
    words = (
        f"50 drawn policies of 4 and 8 tokens and up to 3 steps, {nearest:.2g} to {farthest:.2g} nats of KL per prefix"
    )
    assert words in " ".join(rest)
    assert [line.split()[1] for line in rest[:3]] == ["1", "4", "10"]
    code, out, err = certify(*arguments, "--format", "csv")
    lines = list(csv.DictReader(io.StringIO(out)))
    assert [cells["range_age"] for cells in lines] == ["", "1", "4", "10"]
    assert float(lines[0]["range_error_median"]) == pytest.approx(median)


def test_ranges_are_not_of_policy_losses(certify):
    code, out, err = certify("--policy", "tis", "--range")
    assert (code, out) == (2, "")
    assert "--range is of KL terms" in err


# --- every name, every option ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", built_in(ESTIMATORS))
def test_every_registered_estimator_is_certified_by_its_name(certify, name):
    term = f"{{estimator: {name}, placement: loss}}"
    code, out, err = certify("--term", term, "--regime", "on_policy", "--seed", "0")
    assert code == 0, err
    assert out.splitlines()[2].startswith(name)
    assert "checked (seed 0)" in out


@pytest.mark.parametrize("name", built_in(CORRECTIONS))
def test_every_registered_correction_is_certified_by_its_name(certify, name):
    term = f"{{estimator: k1, placement: reward, correction: {name}}}"
    code, out, err = certify("--term", term, "--regime", "off_policy", "--seed", "0")
    assert code == 0, err
    assert "corrections over 1, 8, 32 and " in out


def test_every_recipe_is_certified_by_its_name(certify):
    code, out, err = certify(*RECIPES.names(), "--regime", "on_policy", "--seed", "0", "--format", "csv")
    assert code == 0, err
    assert [row["name"] for row in csv.DictReader(io.StringIO(out))] == RECIPES.names()
    assert "gradients enumerated" in err


def test_the_bare_command_says_what_was_checked(certify):
    code, out, err = certify("--regime", "on_policy", "--seed", "0")
    assert code == 0, err
    text = " ".join(out.split())  # lines end where the terminal does
    assert "trl/default" in text
    assert "k_lambda with lam = " in text
    assert "top_k on 12 distributions of 40 tokens" in text
    assert "truncated" in text


@pytest.mark.parametrize(
    "options",
    [
        ("--matrix",),
        ("--estimator", "top_k", "--format", "json"),
        ("--estimator", "top_k", "--format", "latex"),
        ("--estimator", "top_k", "--full"),
        ("--estimator", "top_k", "--plot", "plane.png"),
        ("--estimator", "top_k", "--search", "0.2", "--format", "csv"),
        ("--term", "{estimator: top_k, options: {form: bucket, k: 2}}", "--format", "markdown"),
        ("--policy", "tis"),
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_each_option_runs_with_the_estimators_that_read_top_tokens(options, certify, monkeypatch):
    """The matrix of three estimators, two of which are the yardsticks; that of all of them is slow."""
    parts = ("exact", "exact_forward", "top_k")
    monkeypatch.setattr(ESTIMATORS, "_entries", {name: ESTIMATORS.get(name) for name in parts})
    code, out, err = certify(*options, "--regime", "on_policy", "--seed", "0")
    assert code == 0, err
    assert out, err


def test_a_verdict_is_the_same_in_every_call_and_the_seed_is_printed(certify):
    arguments = ("--term", "{estimator: k_lambda, placement: loss}", "--regime", "on_policy")
    _, first, _ = certify(*arguments)
    _, second, _ = certify(*arguments)
    _, of_seed_5, _ = certify(*arguments, "--seed", "5")
    assert first == second
    assert "checked (seed 0)" in first
    assert "checked (seed 5)" in of_seed_5
    assert of_seed_5 != first


# --- what it refuses ------------------------------------------------------------------------------------------------
PLUGINS = {
    "shape.py": "return log_ratio.sum()",
    "nan.py": "return log_ratio.sqrt()",
    "raises.py": "raise KeyError('no')",
    "list.py": "return [0.0]",
}
HEAD = """
from kl_comedy.registry import ESTIMATORS


@ESTIMATORS.register("mine", source="test", claims={claims}, needs="log_ratio")
def mine(log_ratio):
    '''Mine.'''
    {body}
"""

REFUSED = {
    ("k4",): "NAME: got 'k4', neither a recipe nor an estimator; did you mean 'k3'?",
    ("gpro",): "gpro: neither a recipe nor a file; did you mean 'grpo'?",
    ("missing.yaml",): "missing.yaml",
    (
        "grpo",
        "--regime",
        "offpolicy",
    ): "--regime: got 'offpolicy'; did you mean 'off_policy'? allowed: on_policy, off_policy, mixed",
    ("grpo", "--format", "jsn"): "--format: got 'jsn'; did you mean 'json'? allowed: table, json, csv, latex, markdown",
    ("bad_key.yaml",): "kll: no such key",
    ("bad_term.yaml",): "bad_term.yaml.0.estimator: got 'k33'",
    ("not_yaml.yaml",): "not_yaml.yaml: not YAML",
    ("--term", "{estimator: k33}"): "--term.estimator: got 'k33'; did you mean 'k3'? allowed:",
    ("--term", "[k1"): "not a YAML mapping",
    ("--term", "{estimator: exact, anchor: behaviour}"): "needs the full distribution",
    ("--term", "{estimator: k1, placement: loss, credit: own}"): "impossible KL term",
    ("--estimator", "k33"): "estimators: got 'k33'",
    ("--plugin", "missing.py"): "--plugin: no such file: missing.py",
    ("--plugin", "shape.py"): "estimator 'mine' must return a tensor of the shape of its argument",
    ("--plugin", "list.py"): "estimator 'mine' must return a tensor",
    ("--plugin", "nan.py"): "estimator 'mine' is nan at a log-ratio of",
    ("--plugin", "import.py"): "--plugin: import.py failed on import: ModuleNotFoundError",
    ("--plugin", "claim.py"): "claims 'value:both'; allowed: value:reverse, value:forward",
    ("grpo", "--regime", "on_policy", "--plot", "plane.jpq"): "--plot: got 'plane.jpq'; allowed: a file that ends in",
    ("--policy", "icepob"): "did you mean 'icepop'",
    ("--policy", "{corection: {}}"): "--policy.corection: no such key",
    ("--policy", "{policy_loss: gspo, correction: {tis: {}}}"): "a second time",
    ("grpo", "--policy", "tis"): "in a second call",
    ("dpo.yaml",): "dpo.yaml: algorithm.dpo takes the place of the policy term and of kl",
    ("--policy", "dpo.yaml"): "dpo.yaml: algorithm.dpo takes the place of the policy term and of kl",
}


def huber_plugin(*, options=""):
    """An estimator that fails where its option is 0."""
    body = "return torch.nn.functional.huber_loss(x, torch.zeros_like(x), delta=delta, reduction='none')"
    plugin = HEAD.format(claims="('nonnegative',)", body=body)
    plugin = plugin.replace("(log_ratio)", "(x, delta=1.0)")
    return "import torch\n" + plugin.replace("needs=", f"{options}needs=")


def test_the_message_on_an_option_that_cannot_be_zero_says_how_to_declare_it(certify, tmp_path):
    (tmp_path / "huber.py").write_text(huber_plugin())
    code, _, err = certify("--plugin", "huber.py")
    assert code == 2
    assert "with delta=0 raised RuntimeError" in err
    assert "declare what the option may be, as options={'delta': {'above': 0}}" in err


def test_an_option_that_cannot_be_zero_is_certified_where_it_is_declared(certify, tmp_path):
    (tmp_path / "huber.py").write_text(huber_plugin(options="options={'delta': {'above': 0}}, "))
    code, _, err = certify("--plugin", "huber.py", "--regime", "on_policy")
    assert code == 0, err


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, certify, tmp_path):
    for name, body in PLUGINS.items():
        (tmp_path / name).write_text(HEAD.format(claims="()", body=body))
    (tmp_path / "claim.py").write_text(HEAD.format(claims="('value:both',)", body="return log_ratio"))
    (tmp_path / "import.py").write_text("import no_such_module\n")
    (tmp_path / "bad_key.yaml").write_text("name: x\nkll: grpo\n")
    (tmp_path / "bad_term.yaml").write_text("- {estimator: k33}\n")
    (tmp_path / "not_yaml.yaml").write_text("a: [1\n")
    (tmp_path / "dpo.yaml").write_text("kl: none\nalgorithm: {dpo: {beta: 0.1}}\n")
    code, _, err = certify(*arguments)
    assert code == 2
    assert REFUSED[arguments] in err
    assert len(err.strip().splitlines()) == 1


# --- broken claims ----------------------------------------------------------------------------------------------------
BROKEN = {
    "a detached log-ratio": HEAD.format(
        claims="('pathwise:token_reverse', 'nonnegative')", body="return 0.5 * log_ratio.detach().square()"
    ),
    "a clamp": HEAD.format(claims="('value:reverse', 'pathwise:zero')", body="return log_ratio.clamp(-20, 20)"),
    "a prefix that forgets tokens older than eight": """
from torch.nn.functional import pad
from kl_comedy.registry import CORRECTIONS


@CORRECTIONS.register("mine", source="test", weights="cost", detached=False, scope="prefix")
def mine(delta_BT):
    '''The product of the last eight ratios.'''
    total_BT = delta_BT.cumsum(-1)
    return (total_BT - pad(total_BT, (8, 0))[..., : total_BT.shape[-1]]).exp()
""",
}


@pytest.mark.parametrize("bug", BROKEN)
def test_a_claim_that_does_not_hold_is_exit_code_1(bug, certify, tmp_path):
    (tmp_path / "bug.py").write_text(BROKEN[bug])
    code, out, err = certify("--plugin", "bug.py", "--regime", "off_policy")
    assert code == 1, err
    assert "claims that do not hold:" in err, err
    assert "mine" in err
    assert "mine" in out, "the table is printed all the same"


def test_a_plugin_whose_claims_hold_is_exit_code_0(certify, tmp_path):
    (tmp_path / "mine.py").write_text(
        HEAD.format(claims="('pathwise:token_reverse', 'nonnegative')", body="return 0.5 * log_ratio.square()")
    )
    rows = rows_of(certify, "--plugin", "mine.py", "--regime", "on_policy")
    assert estimators_of(rows) == {"mine"}
    assert ("token_reverse", "token_reverse") in {(row["target"], row["claimed"]) for row in rows}


def test_the_matrix_has_every_combination_of_the_registered_parts(certify, monkeypatch):
    parts = {name: ESTIMATORS.get(name) for name in ("k1", "exact")}
    monkeypatch.setattr(ESTIMATORS, "_entries", parts)
    rows = rows_of(certify, "--matrix", "--regime", "off_policy")
    assert estimators_of(rows) == set(parts)
    anchors = set()
    for row in rows:
        assert row["kept"], row["terms"]
        anchors.update(term.get("anchor") for term in row["terms"])
    assert "behaviour" in anchors


@pytest.mark.slow
def test_the_claims_of_the_whole_matrix_hold(certify):
    """In the regime with the most claims; of all regimes the pages of the estimators tell."""
    rows = rows_of(certify, "--matrix", "--regime", "off_policy")
    assert len(rows) > 300
    assert {row["terms"][0]["estimator"] for row in rows} >= set(built_in(ESTIMATORS))
    for row in rows:
        assert row["kept"], row["terms"]


def test_policy_terms_are_certified_against_the_reward_gradient(certify):
    rows = rows_of(certify, "--policy", "tis", "--policy", "sequence")
    assert len(rows) == 6
    by_regime = {(row["name"], row["regime"]): row for row in rows}
    assert set(by_regime["tis", "mixed"]) >= FIXED
    exact = by_regime["sequence", "mixed"]
    assert exact["target"] == "reward"
    assert exact["relative_bias"]["reward"] < 1e-9
    assert by_regime["tis", "off_policy"]["target"] is None
    assert by_regime["tis", "on_policy"]["target"] == "reward"


def test_the_policy_term_of_a_config_is_certified(certify, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("algorithm: {policy_loss: ppo_clip, proximal: recomputed, correction: {sequence: {}}}")
    code, out, _ = certify("--policy", str(config), "--regime", "off_policy", "--format", "csv")
    assert code == 0
    assert "the reward gradient of the current policy" in out


def test_an_infinite_cap_is_a_word_in_json(certify):
    rows = rows_of(certify, "--policy", "{correction: {sequence_tis: {cap: .inf}}}")
    assert rows[1]["terms"][0]["corrections"] == {"sequence_tis": {"cap": "inf"}}


def test_a_config_with_a_value_head_is_certified_without_what_is_around_its_terms(certify, tmp_path):
    (tmp_path / "c.yaml").write_text("algorithm: {advantage: gae}\nkl: [{estimator: k1, placement: reward}]")
    assert {row["in_training"] for row in rows_of(certify, "c.yaml")} == {None}


def test_decoupled_ppo_is_certified_at_a_later_update_too(certify):
    rows = rows_of(certify, "--policy", "decoupled_ppo")
    targets = {(row["regime"], row["update"]): row["target"] for row in rows}
    assert set(targets) == {
        ("on_policy", "first"),
        ("off_policy", "first"),
        ("off_policy", "later"),
        ("mixed", "first"),
        ("mixed", "later"),
    }
    assert targets["on_policy", "first"] == "reward"
    assert targets["off_policy", "later"] is None
    _, out, _ = certify("--policy", "decoupled_ppo", "--regime", "off_policy")
    assert "later" in out


def test_a_plugins_policy_correction_is_held_to_its_claims(certify, tmp_path):
    plugin = tmp_path / "half.py"
    plugin.write_text(
        "import torch\n"
        "from kl_comedy.objective.policy_corrections import Weights\n"
        "from kl_comedy.registry import POLICY_CORRECTIONS\n"
        "@POLICY_CORRECTIONS.register('half', source='test', claims=('on_policy', 'off_policy'), role='ratio')\n"
        "def half(delta_BT, advantage_BT, mask_BT, power=0.5):\n"
        "    'The root of the sequence ratio.'\n"
        "    no_BT = torch.zeros_like(mask_BT)\n"
        "    weight_BT = (power * delta_BT.sum(-1, keepdim=True)).exp().expand_as(delta_BT)\n"
        "    return Weights(weight_BT=weight_BT, truncated_BT=no_BT, masked_BT=no_BT)\n"
    )
    code, out, error = certify("--policy", "half", "--plugin", plugin, "--format", "json")
    claim_holds = {row["regime"]: row["kept"] for row in json.loads(out)}
    assert code == 1
    assert claim_holds == {"on_policy": True, "off_policy": False, "mixed": False}
    assert "half, off_policy: claims the reward gradient" in error
    # Its power 1 is the sequence ratio itself.
    rows = rows_of(certify, "--policy", "{correction: {half: {power: 1.0}}}", "--plugin", plugin)
    assert {row["target"] for row in rows} == {"reward"}
