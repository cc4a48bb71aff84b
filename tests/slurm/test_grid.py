"""Grids: what they expand to, how cells are named, and one clear error for each mistake."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from commands import cpu_limit
from kl_comedy.errors import UserError
from kl_comedy.slurm.grid import expand, override, read_grid, split_axes
from kl_comedy.slurm.manifest import plan

BASE = "model: {options: {preset: tiny}}\nkl: [{estimator: k1, placement: reward, beta: 0.05}]\n"


def grid(tmp_path, text):
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "grid.yaml").write_text(f"base: base.yaml\n{text}")
    return read_grid(tmp_path / "grid.yaml")


def planned(tmp_path, text, **options):
    return plan(grid(tmp_path, text), directory=tmp_path, **options)


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp", "Co", "Cn"]), max_size=20)


@given(st.one_of(PLAIN, TEXT.filter(lambda text: "${" not in text), st.lists(PLAIN, max_size=3)))
def test_an_override_reads_back_to_the_same_value(value):
    read = OmegaConf.to_container(OmegaConf.from_dotlist([override("value", value)]), resolve=False)["value"]
    assert read == value
    assert type(read) is type(value)


GRID_WITH_ALL_PARTS = """
grid:
  kl: {reward: [{estimator: k1, placement: reward}], grpo: grpo}
  optimizer.lr: [1e-4, 3e-4]
seeds: 2
exclude:
  - {kl: grpo, optimizer.lr: 3e-4}
  - {kl: reward, optimizer.lr: 1e-4, seed: 1}
rows:
  no-kl: {kl: none}
  fixed: {seed: 7, optimizer.lr: 1e-3}
"""


def test_the_product_the_seeds_the_exclusions_and_the_rows(tmp_path):
    points = expand(grid(tmp_path, GRID_WITH_ALL_PARTS))
    assert [(point.label, point.seed) for point in points] == [
        ("reward-lr0.0001", 0),
        ("reward-lr0.0003", 0),
        ("reward-lr0.0003", 1),
        ("grpo-lr0.0001", 0),
        ("grpo-lr0.0001", 1),
        ("no-kl", 0),
        ("no-kl", 1),
        ("fixed", None),
    ]
    assert points[0].values == {"kl": "reward", "optimizer.lr": "0.0001"}


def test_labels_differ_where_names_of_files_would_not(tmp_path):
    points = expand(grid(tmp_path, "grid: {kl: ['verl/k3+', 'verl/k3', 'verl-k3']}\n"))
    assert [point.label for point in points] == ["verl-k3", "verl-k3-2", "verl-k3-3"]


def test_a_key_of_one_value_is_in_no_name(tmp_path):
    points = expand(grid(tmp_path, "name: mine\ngrid: {kl.0.beta: [0.1], optimizer.lr: [1, 2]}\n"))
    assert [point.label for point in points] == ["lr1", "lr2"]
    (point,) = expand(grid(tmp_path, "name: mine\ngrid: {kl.0.beta: [0.1]}\n"))
    assert point.label == "mine"


def test_a_number_that_would_make_two_names_equal_is_refused(tmp_path):
    with pytest.raises(UserError, match="got 'verl-k3-2'; allowed: names that differ; name the values"):
        expand(grid(tmp_path, "grid: {kl: [verl-k3-2, 'verl/k3', 'verl-k3']}\n"))


EXCLUSIONS = {
    "null is a value": ("kl.0.window: [null, 4]", "kl.0.window: null", ["None/0.3"]),
    "a value beside null": ("kl.0.window: [null, 4]", "kl.0.window: 4", ["4/0.3"]),
    "null in a list": ("kl.0.window: [null, 4, 8]", "kl.0.window: [null, 8]", ["None/0.3", "8/0.3"]),
    "null by its name": ("kl.0.window: {whole: null, four: 4}", "kl.0.window: whole", ["None/0.3"]),
    "text beside null": ("kl.0.credit: [null, own]", "kl.0.credit: own", ["own/0.3"]),
    "false and 0": ("trainer.x: [false, 0, 0.0]", "trainer.x: false", ["False/0.3"]),
    "1 and true": ("trainer.x: [true, 1]", "trainer.x: 1", ["1/0.3"]),
    "a list by its name": ("trainer.x: {a: [1, 2], b: [2, 1]}", "trainer.x: a", ["[1, 2]/0.3"]),
    "a list by itself": ("trainer.x: [[1, 2], [2, 1]]", "trainer.x: [[1, 2]]", ["[1, 2]/0.3"]),
}
"""By kind of value: the axis beside a learning rate of 0.1 and 0.3, a rule for 0.3, the cells that it drops."""


def settings_of(points):
    """The values of each cell, in one text."""
    return ["/".join(str(value) for value in point.settings.values()) for point in points]


@pytest.mark.parametrize(("axis", "rule", "expected"), EXCLUSIONS.values(), ids=EXCLUSIONS)
def test_a_rule_drops_the_cells_that_it_names_and_no_others(tmp_path, axis, rule, expected):
    text = f"grid: {{{axis}, optimizer.lr: [0.1, 0.3]}}\n"
    all_cells = settings_of(expand(grid(tmp_path, text)))
    remaining = settings_of(expand(grid(tmp_path, text + f"exclude: [{{{rule}, optimizer.lr: 0.3}}]\n")))
    dropped = [cell for cell in all_cells if cell not in remaining]
    assert dropped == expected
    assert len(remaining) == len(all_cells) - len(dropped)


def test_cells_have_names_seeds_steps_and_overrides(tmp_path):
    text = "overrides: {train.steps: 5}\ngrid: {kl.0.beta: [0.1, 0.2]}\nseeds: [3, 5]\n"
    # ``extra`` is what a user types after the grid.
    cells = planned(tmp_path, text, extra=["train.steps=6"]).manifest.cells
    assert [(cell.name, cell.seed) for cell in cells] == [
        ("beta0.1", 3),
        ("beta0.1", 5),
        ("beta0.2", 3),
        ("beta0.2", 5),
    ]
    assert {cell.steps for cell in cells} == {6}, "what is typed wins"


def test_the_config_of_a_cell_is_the_base_under_its_settings(tmp_path):
    from kl_comedy.config import load_config

    text = "overrides: {train.steps: 5}\ngrid: {kl.0.beta: [0.1, 0.2], kl.0.estimator: [k1, k3]}\nseeds: 2\n"
    made = planned(tmp_path, text, extra=["optimizer.lr=0.5"])
    assert len(made.configs) == len(made.manifest.cells) == 8
    for cell, config in zip(made.manifest.cells, made.configs, strict=True):
        words = ["train.steps=5", "optimizer.lr=0.5", f"name={cell.name}", f"seed={cell.seed}"]
        words += [f"{key}={value}" for key, value in cell.values.items()]
        assert config == load_config(tmp_path / "base.yaml", words)
    assert len({(cell.name, cell.seed) for cell in made.manifest.cells}) == 8


def test_a_key_of_the_grid_cannot_be_typed(tmp_path):
    with pytest.raises(UserError, match="is set by the sweep"):
        planned(tmp_path, "grid: {optimizer.lr: [1, 2]}\n", extra=["optimizer.lr=3"])


MISTAKES = {
    "grid: {optimizer.lrr: [1, 2]}": r"optimizer.lrr: no such key .* did you mean 'lr'",
    "grids: {}": r"grids: no such key .* did you mean 'grid'",
    "grid: {optimizer.lr: []}": r"grid.optimizer.lr: is empty",
    "grid: {optimizer.lr: [1, 1]}": r"each value once",
    "grid: {optimizer.lr: 1}": r"a list, or {name: value",
    "grid: {optimizer.lr: {a b: 0.1}}": r"grid.optimizer.lr: got 'a b'; allowed: names of letters",
    "grid: {optimizer.lr: [0.1], kl.0.beta: [-1, 1]}\nexclude: [{optimizer.lr: 0.2}]": r"exclude: .* matches no cell",
    "grid: {optimizer.lr: [0.1]}\nexclude: [{optimizer.rl: 0.1}]": r"did you mean 'optimizer.lr'",
    "grid: {optimizer.lr: [0.1]}\nexclude: [{optimizer.lr: 0.1}]": r"no cells: everything is excluded",
    "grid: {kl.0.estimator: [k1, k33]}": r"cell 1 \(k33\).*estimator.*'k33'.*did you mean 'k3'",
    "grid: {kl.0.level: [token, sequence]}\noverrides: {kl.0.estimator: exact}": r"cell 1 \(sequence\).*impossible",
    "grid: {kl: [[{estimator: k1}], grpo]}": r"a name for it",
    "grid: {output: [a, b]}": r"output: cannot be set in a sweep",
    "grid: {seed: [1]}\nseeds: 2": r"seed: is set twice",
    "seeds: 0": r"how many \(1 to 100000\)",
    "rows: {a: {optimizer.lr: 0.1}, b: {optimizer.lr: 0.1}}": r"cells 0 \(a\) and 1 \(b\) are the same run",
    "grid: {kl: [grpo, none]}\nrows: {grpo: {optimizer.lr: 0.1}}": r"a cell of the grid is called grpo too",
    "evaluate: {eval.sample: 3}": r"evaluate: eval.sample: no such key .* did you mean 'samples'",
    "overrides: {tracking.uri: mlflow.db}": r"tracking.uri: got 'mlflow.db'",
    "max_parallel: 0": r"max_parallel: got 0",
    "name: 'a b'": r"name: got 'a b'",
    "grid: {a: [1]": r"is not valid YAML",
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.items())
def test_a_mistake_is_one_clear_error(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        planned(tmp_path, text + "\n")
    assert "\n" not in str(caught.value)


def test_a_grid_file_that_does_not_exist_names_the_nearest_one(tmp_path):
    grid(tmp_path, "seeds: 1\n")
    with pytest.raises(UserError, match=r"did you mean .*grid.yaml"):
        read_grid(tmp_path / "gird.yaml")


def test_a_base_that_does_not_exist_is_refused(tmp_path):
    (tmp_path / "grid.yaml").write_text("base: bse.yaml\n")
    with pytest.raises(UserError, match=r"no such config file"):
        plan(read_grid(tmp_path / "grid.yaml"), directory=tmp_path)


def test_a_grid_needs_a_base(tmp_path):
    (tmp_path / "grid.yaml").write_text("seeds: 2\n")
    with pytest.raises(UserError, match=r"grid.yaml: .*needs base"):
        read_grid(tmp_path / "grid.yaml")


def joined(template, numbers):
    return ", ".join(template.format(n) for n in numbers)


TWO_HUNDRED_AXES_OF_TWO = "grid: {" + joined("a{}: [1, 2]", range(200)) + "}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds: 1000000000000", r"seeds: got 1000000000000; allowed: how many \(1 to 100000\)"),
        (TWO_HUNDRED_AXES_OF_TWO, "grid: has more than 100000 cells"),
        ("grid: {" + "a." * 100 + "b: [1]}", "no such key; a key has at most 30 parts"),
        ("name: " + "x" * 221, "name: got .* at most 220"),
        ("grid: {optimizer.lr: {" + "x" * 221 + ": 0.1, b: 0.2}}", "name: got .*at most 220 characters"),
        ("rows: {" + "x" * 221 + ": {optimizer.lr: 0.1}}", "name: got .*at most 220 characters"),
        ("rows: {a b: {optimizer.lr: 0.1}}", "name: got 'a b'"),
    ],
)
def test_a_grid_over_a_limit_is_refused_in_one_line(tmp_path, text, message):
    """Within two seconds on an idle core; ten are allowed here."""
    with cpu_limit(10), pytest.raises(UserError, match=message) as error:
        planned(tmp_path, text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


def test_a_large_grid_within_the_limits_is_expanded(tmp_path):
    axis = list(range(1, 301))
    text = f"grid: {{a: {axis}, b: [1, 2]}}\nseeds: 20\nexclude: [{{a: [1, 2], b: 1}}, {{a: 300}}]\n"
    # The first rule drops two of the 300 x 2 points, the second two more.
    assert len(expand(grid(tmp_path, text))) == (300 * 2 - 2 - 2) * 20


# --- the grids of this repository -------------------------------------------------------------------------------------

CONFIGS = Path(__file__).parents[2] / "configs"
GRIDS = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "\nbase: " in f"\n{path.read_text()}"]


def slow_cells(path):
    """Settings and seed of each cell, one key after the other, from the file as YAML."""
    raw = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    cells = [[]]
    for key, item in raw.get("grid", {}).items():
        named = item.items() if isinstance(item, dict) else [(value, value) for value in item]
        cells = [[*cell, (key, name, value)] for cell in cells for name, value in named]
    if "grid" not in raw:
        cells = []
    seeds = raw.get("seeds", [None])
    seeds = list(range(seeds)) if isinstance(seeds, int) else seeds
    result = []
    for cell in cells:
        for seed in seeds:
            names = {key: name for key, name, _ in cell} | {"seed": seed}
            texts = {key: json.dumps(name) for key, name in names.items()}
            excluded = False
            for rule in raw.get("exclude", []):
                lists = {key: item if isinstance(item, list) else [item] for key, item in rule.items()}
                excluded |= all(texts[key] in map(json.dumps, items) for key, items in lists.items())
            if not excluded:
                result.append(({key: value for key, _, value in cell}, seed))
    for row in raw.get("rows", {}).values():
        result += [(row, seed) for seed in seeds]
    return result


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_grid_has_the_cells_of_its_file_in_their_order(path):
    assert [(point.settings, point.seed) for point in expand(read_grid(path))] == slow_cells(path)


REGISTERED = {
    "centring/centring.yaml": (
        405,
        "15a94f6da31be46092549ea9f4c9671af19b09b1d9d3413883a8505266fd75a1",
    ),
    "hack/grid.yaml": (
        240,
        "bd66d21975a56fefb903d3c504f5691657adbb9ec0d1574d354461479ce2f07e",
    ),
    "hack/target.yaml": (
        60,
        "886018e911e28be457d4115971b3ab517b112230ba3afdf76f98e66d08673d1a",
    ),
    "hack/tune.yaml": (
        264,
        "815b500df82878a614146c3461b29f1f982736e6c890540c4f5cfe5d5224ab51",
    ),
}
"""Grids that registered protocols name: the number of their cells, and the sha256 of every cell's name, seed,
settings and values. A run of them says which cell it is, so that they may not change."""


@pytest.mark.parametrize(("name", "expected"), REGISTERED.items(), ids=REGISTERED)
def test_the_planned_cells_of_registered_evidence_do_not_change(name, expected):
    points = expand(read_grid(CONFIGS / name))
    cells = [[point.label, point.seed, [*point.settings.items()], [*point.values.items()]] for point in points]
    assert (len(cells), hashlib.sha256(json.dumps(cells).encode()).hexdigest()) == expected


# --- values on the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("seed=0,1,7", [0, 1, 7]),
        ("data.prompt.prefix='a, b',c", ["a, b", "c"]),
        ("kl.0.beta=0.01,0.03", [0.01, 0.03]),
        ("optimizer.lr=1e-4,3e-4", [1e-4, 3e-4]),
        ("kl=grpo,none", ["grpo", "none"]),
        ("optimizer.betas=[0.9,0.99],[0.8,0.9]", [[0.9, 0.99], [0.8, 0.9]]),
        ("kl.0.window=null,4", [None, 4]),
    ],
)
def test_a_word_with_several_values_is_an_axis(word, values):
    assert split_axes([word]) == ({word.partition("=")[0]: values}, [])


@pytest.mark.parametrize(
    "word",
    [
        "optimizer.betas=[0.9,0.99]",
        "kl.0.beta={start: 0.1, end: 0, steps: 5}",
        "data.prompt.prefix='a, b'",
        'data.prompt.prefix="0, b"',
        "output=../runs",
        "seed=3",
        "kl.0.beta=0.1",
    ],
)
def test_a_comma_within_a_value_separates_nothing(word):
    assert split_axes([word]) == ({}, [word])


def test_values_that_are_no_list_are_refused_by_key():
    with pytest.raises(UserError, match=r"^kl.0.beta: cannot read the value"):
        split_axes(["kl.0.beta=0.1,,0.2"])
    assert split_axes(["kl.0.beta=0.1,"]) == ({}, ["kl.0.beta=0.1,"]), "what a run would refuse, a cell does"


def test_two_words_for_one_key_are_refused():
    with pytest.raises(UserError, match="seed: has several values twice"):
        split_axes(["seed=0,1", "seed=2,3"])


def test_axes_over_a_config_are_the_grid_that_a_file_would_be(tmp_path):
    text = "name: base-seed-beta\ngrid: {kl.0.beta: [0.01, 0.03]}\nseeds: [0, 1]\n"
    of_a_file = planned(tmp_path, text, extra=["train.steps=3"])
    axes, extra = split_axes(["seed=0,1", "kl.0.beta=0.01,0.03", "train.steps=3"])
    typed = plan(read_grid(tmp_path / "base.yaml", axes=axes), directory=tmp_path, extra=extra)
    assert typed == of_a_file
    assert [cell.name for cell in typed.manifest.cells] == ["beta0.01", "beta0.01", "beta0.03", "beta0.03"]


def test_axes_are_added_to_those_of_a_grid_file(tmp_path):
    grid(tmp_path, "grid: {kl.0.beta: [0.01, 0.03]}\n")
    file = tmp_path / "grid.yaml"
    assert len(expand(read_grid(file, axes={"optimizer.lr": [0.1, 0.2], "seed": [4, 5]}))) == 8
    with pytest.raises(UserError, match=r"kl.0.beta: is set by the grid, cell by cell, and on the command line"):
        read_grid(file, axes={"kl.0.beta": [1, 2]})
    file.write_text("base: base.yaml\nseeds: 3\n")
    with pytest.raises(UserError, match="seed: is set by the grid"):
        read_grid(file, axes={"seed": [1, 2]})


def test_a_config_without_axes_is_no_sweep(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    with pytest.raises(UserError, match=r"base.yaml is a config, of one run; .* seed=0,1,2 or kl.0.beta=0.01,0.03"):
        read_grid(tmp_path / "base.yaml")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"name": ["a", "b"]}, "name: cannot be set in a sweep"),
        ({"seed": [1, 1]}, r"seeds: got \[1, 1\]; allowed: .* different whole numbers"),
        ({"kl.0.beta": [0.1, 0.1]}, "grid.kl.0.beta: got 0.1; allowed: each value once"),
    ],
)
def test_axes_follow_the_rules_of_a_grid_file(tmp_path, axes, message):
    (tmp_path / "base.yaml").write_text(BASE)
    with pytest.raises(UserError, match=f"^{message}"):
        read_grid(tmp_path / "base.yaml", axes=axes)
