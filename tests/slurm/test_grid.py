"""Grids: what they expand to, how cells are named, and one clear error for each mistake."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from commands import cpu_limit
from kl_comedy.errors import UserError
from kl_comedy.slurm.grid import expand, override, parse_values, read_grid, split_axes
from kl_comedy.slurm.manifest import plan

BASE = "model: {options: {preset: tiny}}\nkl: [{estimator: k1, placement: reward, beta: 0.05}]\n"


def grid(tmp_path, text):
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "grid.yaml").write_text(f"base: base.yaml\n{text}")
    return read_grid(tmp_path / "grid.yaml")


def planned(tmp_path, text, **options):
    return plan(grid(tmp_path, text), directory=tmp_path, **options)


def raws(item):
    return [value.raw for value in parse_values("key", item)]


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ([1, "a", None], [1, "a", None]),
        ({"from": 1, "to": 7, "step": 3}, [1, 4, 7]),
        ({"from": 0.1, "to": 0.3, "step": 0.1}, [0.1, 0.2, 0.3]),
        ({"from": 3, "to": 1, "step": -1}, [3, 2, 1]),
        ({"from": 0, "to": 1, "num": 5}, [0.0, 0.25, 0.5, 0.75, 1.0]),
        ({"from": 1e-3, "to": 10, "log": 5}, [0.001, 0.01, 0.1, 1.0, 10.0]),
    ],
    ids=["list", "integers", "decimals without rounding errors", "downwards", "points", "logarithmic"],
)
def test_lists_and_ranges(axis, expected):
    assert raws(axis) == expected


@given(
    first=st.floats(1e-6, 1e6),
    last=st.floats(1e-6, 1e6),
    points=st.integers(2, 40),
    spacing=st.sampled_from(["num", "log"]),
)
def test_a_range_of_points_has_that_many_between_its_ends(first, last, points, spacing):
    # Points so close together would be rounded to the same number, which is refused.
    if abs(last - first) < 1e-3 * max(first, last):
        return
    numbers = raws({"from": first, "to": last, spacing: points})
    assert len(numbers) == points
    assert numbers[0] == pytest.approx(first)
    assert numbers[-1] == pytest.approx(last)
    assert sorted(numbers, reverse=last < first) == numbers


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


EXCLUSIONS = {
    "null is a value": ("kl.0.window: [null, 4]", "kl.0.window: null", ["None/0.3"]),
    "a value beside null": ("kl.0.window: [null, 4]", "kl.0.window: 4", ["4/0.3"]),
    "null in a list": ("kl.0.window: [null, 4, 8]", "kl.0.window: [null, 8]", ["None/0.3", "8/0.3"]),
    "null by its name": ("kl.0.window: {whole: null, four: 4}", "kl.0.window: whole", ["None/0.3"]),
    "null that has a name": ("kl.0.window: {whole: null, four: 4}", "kl.0.window: null", ["None/0.3"]),
    "text beside null": ("kl.0.credit: [null, own]", "kl.0.credit: own", ["own/0.3"]),
    "false and 0": ("trainer.x: [false, 0, 0.0]", "trainer.x: false", ["False/0.3"]),
    "1 and true": ("trainer.x: [true, 1]", "trainer.x: 1", ["1/0.3"]),
    "a list as a value": ("trainer.x: {a: [1, 2], b: [2, 1]}", "trainer.x: [1, 2]", ["[1, 2]/0.3"]),
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
    "grid: {optimizer.lr: {from: 1, to: 0, step: 1}}": r"range from 1 to 0 by 1 is empty",
    "grid: {optimizer.lr: {from: 1, to: 2, stepp: 1}}": r"stepp: no such key .* did you mean 'step'",
    "grid: {optimizer.lr: {from: 1, to: 2}}": r"one of step, num \(points\) or log",
    "grid: {optimizer.lr: {from: 0, to: 2, log: 3}}": r"above 0",
    "grid: {optimizer.lr: {from: 0, to: 1, num: 0}}": r"whole number of points",
    "grid: {optimizer.lr: {from: 0, to: 1, step: 1.0e-9}}": r"at most 100000 values",
    "grid: {optimizer.lr: [1, 1]}": r"each value once",
    "grid: {optimizer.lr: 1}": r"a list, a range",
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
    "grid: {a: {from: 0, to: 9, num: 1000}, b: {from: 0, to: 9, num: 1000}}": r"more than 100000 cells",
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
TWO_HUNDRED_AND_ONE_KEYS = "grid: {" + joined("a{}: [1]", range(201)) + "}"
ONE_NAME_FOR_MANY = "grid: {a: [" + ", ".join(f"'{'-' * n}'" for n in range(1, 150)) + "]}"
"""Values of dashes alone: none is left in the name of a cell."""
MANY_EXCLUSIONS = (
    "grid: {a: {from: 1, to: 300, step: 1}, b: {from: 1, to: 300, step: 1}}\n"
    "exclude: [" + joined("{{a: {}}}", range(1, 200)) + "]"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {a: {from: 0, to: 1" + "0" * 300 + ", step: 1}}", "a number of more than 100 characters"),
        ("grid: {a: {from: 0, to: 1e300, step: 1}}", r"grid\.a\.to: got 1e\+300; allowed: .* at most 1e\+100 in size"),
        ("grid: {a: {from: -1e308, to: 1e308, step: 1}}", r"grid\.a\.from: got -1e\+308"),
        ("grid: {a: {from: 0, to: 1e99, step: 1}}", r"grid\.a\.step: got 1; allowed: a step that makes at most 100000"),
        ("grid: {a: {from: 0, to: 1, step: 1e-320}}", r"grid\.a\.step: got 1e-320"),
        ("seeds: 1000000000000", r"seeds: got 1000000000000; allowed: how many \(1 to 100000\)"),
        (TWO_HUNDRED_AXES_OF_TWO, "grid: has more than 100000 cells"),
        (TWO_HUNDRED_AND_ONE_KEYS, "grid: has 201 keys; allowed: at most 200"),
        ("grid: {" + "a." * 100 + "b: [1]}", "no such key; a key has at most 30 parts"),
        ("name: " + "x" * 221, "name: got .* at most 220 characters"),
        ("grid: {kl.0.beta: [" + "x" * 221 + ", b]}", "grid: got .*names of at most 220 characters"),
        (ONE_NAME_FOR_MANY, "at most 100 cells of one name"),
        (MANY_EXCLUSIONS, "exclude: 90000 cells times 199 exclusions are more than 1000000"),
    ],
)
def test_a_grid_over_a_limit_is_refused_in_one_line(tmp_path, text, message):
    """Within two seconds on an idle core; ten are allowed here."""
    with cpu_limit(10), pytest.raises(UserError, match=message) as error:
        expand(grid(tmp_path, text))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_large_grid_within_the_limits_is_expanded(tmp_path):
    text = "grid: {a: {from: 1, to: 300, step: 1}, b: [1, 2]}\nseeds: 20\nexclude: [{a: [1, 2], b: 1}, {a: 300}]\n"
    # The first rule drops two of the 300 x 2 points, the second two more.
    assert len(expand(grid(tmp_path, text))) == (300 * 2 - 2 - 2) * 20


# --- values on the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("seed=0..4", [0, 1, 2, 3, 4]),
        ("seed=-1..1", [-1, 0, 1]),
        ("seed=0..1,7", [0, 1, 7]),
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
        'data.prompt.prefix="0..4, b"',
        "output=../runs",
        "seed=3",
        "kl.0.beta=0.1",
    ],
)
def test_a_comma_within_a_value_separates_nothing(word):
    assert split_axes([word]) == ({}, [word])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("kl.0.beta=0.1..0.3", r"kl.0.beta: got '0.1..0.3'; allowed: values with commas, .* or whole numbers from..to"),
        ("kl.0.beta=0.1,", r"kl.0.beta: got '0.1,'; .* \(a value is empty\)"),
        ("seed=4..0", r"seed: the range 4..0 is empty"),
        ("seed=0..1000000", r"seed: got '0..1000000'; allowed: a range of at most 100000 values"),
    ],
)
def test_what_is_no_list_of_values_is_refused(word, message):
    with pytest.raises(UserError, match=f"^{message}"):
        split_axes([word])


def test_a_range_has_both_its_ends_and_a_limit():
    assert split_axes(["seed=3..3"])[0] == {"seed": [3]}
    assert split_axes(["seed=-1..1"])[0] == {"seed": [-1, 0, 1]}
    assert len(split_axes(["seed=1..100000"])[0]["seed"]) == 100_000
    with pytest.raises(UserError, match="a range of at most 100000 values"):
        split_axes(["seed=0..100000"])


def test_two_words_for_one_key_are_refused():
    with pytest.raises(UserError, match="seed: has several values twice"):
        split_axes(["seed=0..1", "seed=2,3"])


def test_axes_over_a_config_are_the_grid_that_a_file_would_be(tmp_path):
    text = "name: base-seed-beta\ngrid: {kl.0.beta: [0.01, 0.03]}\nseeds: [0, 1]\n"
    of_a_file = planned(tmp_path, text, extra=["train.steps=3"])
    axes, extra = split_axes(["seed=0..1", "kl.0.beta=0.01,0.03", "train.steps=3"])
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
    with pytest.raises(UserError, match=r"base.yaml is a config, of one run; .* seed=0..4 or kl.0.beta=0.01,0.03"):
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
