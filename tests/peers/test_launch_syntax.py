"""What a launch file sets, by its syntax: settings with their origin, and what it leaves to others."""

import json
import re

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as h_settings
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.peers.launch_settings import Setting
from kl_comedy.peers.launch_syntax import parse


def settings_of(folder, name, text):
    """The texts of a file's settings by key."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return {setting.key: setting.text for setting in parse(path).settings}


@pytest.mark.parametrize(
    ("name", "text", "settings"),
    [
        ("a.sh", 'srun bash -c "python t.py --a 1 b.c=2"\n', {"a": "1", "b.c": "2"}),
        ("a.sh", "cat > run.yaml <<EOF\na: {b: 1}\nEOF\n", {"a.b": "1"}),
        ("a.yaml", "run: |\n  python t.py --a 1\n", {"a": "1"}),
        ("a.yaml", "command: [python, t.py, --a, 1, b.c=2]\n", {"a": "1", "b.c": "2"}),
        ("a.yaml", "a: null\nb: {c: true}\n", {"a": "none", "b.c": "true"}),
        ("a.py", "o = {'a': 1}\no['b'] = 2\nConfig(**o, c=3)\n", {"a": "1", "b": "2", "c": "3"}),
        ("a.py", "B = 4\nrun(f'python t.py --a {B}')\n", {"a": "4"}),
        ("a.py", "run(['python', 't.py', '--a', '1', 'b.c=2'])\n", {"a": "1", "b.c": "2"}),
        ("a.py", "c = Config(a=1)\nc.b = 2\n", {"a": "1", "b": "2"}),
        ("a.py", "class Mine(Config):\n    a: float = field(default=0.5)\n", {"a": "0.5"}),
        ("a.py", "import os\nConfig(a=float(os.environ.get('A', '0.5')))\n", {"a": "0.5"}),
        ("a.py", "o = dict(b=1)\no.update(a=2)\no |= {'c': 3}\nConfig(**o)\n", {"a": "2", "b": "1", "c": "3"}),
        ("a.py", "import dataclasses\nc = Config(a=1)\nd = dataclasses.replace(c, a=2)\n", {"a": "2"}),
        ("a.py", "c = Config()\nsetattr(c, 'a', 2)\n", {"a": "2"}),
        ("a.py", "c = OmegaConf.merge(base, OmegaConf.create({'a': {'b': 1}}))\n", {"a.b": "1"}),
        ("a.py", "OmegaConf.update(c, 'a.b', 1)\n", {"a.b": "1"}),
        ("a.py", "config.a.b = 1\ncfg['c']['d'] = 2\n", {"a.b": "1", "c.d": "2"}),
        ("a.py", "C = {'x': {'a': 1}}\nConfig(**C['x'])\n", {"a": "1"}),
        ("a.py", "run(['python', 't.py'] + more)\nflags = {'a': 1}\n", {"a": "1"}),
        ("a.yml", "variables: {B: 2}\nscript:\n- pip install x\n- python t.py --a $B\n", {"a": "2"}),
        ("a.yaml", "program: t.py\nparameters:\n  a: {value: 1}\n  b: {values: [2, 3]}\n", {"a": "1", "b": "2"}),
        ("a.py", "Config(a=args.b or 2)\n", {"a": "2"}),
        ("Makefile", "B ?= 2\ntrain:\n\t@python t.py --a $(B)\n", {"a": "2"}),
        ("justfile", 'b := "2"\ntrain:\n    python t.py --a {{b}}\n', {"a": "2"}),
        ("a.sh", 'cat > c.json <<EOF\n{"a": {"b": "c"}}\nEOF\n', {"a.b": "c"}),
        ("a.sh", "export B=2\npython - <<'EOF'\nimport os\nConfig(a=os.environ['B'])\nEOF\n", {"a": "2"}),
        ("a.yaml", "envs: {B: 2}\nrun: |\n  python t.py --a $B\n", {"a": "2"}),
        ("a.yaml", "env:\n- {name: B, value: 2}\nargs:\n- |\n  set -e\n  python t.py --a $B\n", {"a": "2"}),
        ("a.yaml", "commands:\n- export B=2\n- python t.py --a $B\n", {"a": "2"}),
    ],
)
def test_settings_are_read(tmp_path, name, text, settings):
    found = settings_of(tmp_path, name, text)
    assert {key: found.get(key) for key in settings} == settings


def test_a_notebook_is_read_cell_by_cell(tmp_path):
    cells = ["%%bash\npython t.py --a 1\n", "!python t.py --b 2\nConfig(c=3)\n", "this is no Python\n", "Config(d=4)\n"]
    notebook = {"cells": [{"cell_type": "code", "source": source} for source in cells]}
    found = settings_of(tmp_path, "a.ipynb", json.dumps(notebook))
    assert found == {"a": "1", "b": "2", "c": "3", "d": "4"}


def test_a_command_of_a_notebook_goes_on_in_the_next_lines(tmp_path):
    source = "if True:\n    !python t.py --a 1 \\\n      --b 2\n    x = Config(c=3)\n"
    notebook = {"cells": [{"cell_type": "code", "source": source}]}
    assert settings_of(tmp_path, "a.ipynb", json.dumps(notebook)) == {"a": "1", "b": "2", "c": "3"}


def test_flags_of_an_array_that_no_command_gets_come_before_those_of_commands(tmp_path):
    path = tmp_path / "a.sh"
    path.write_text("python t.py --a 1\nMORE=(--a 2 --b 3)\n")
    assert [(setting.key, setting.text) for setting in parse(path).settings] == [("a", "2"), ("b", "3"), ("a", "1")]


def test_help_and_docstrings_are_no_commands(tmp_path):
    text = '"""Run with --a 1 and --b 2."""\nparser.add_argument("--c", help="as --c 3 --d 4")\n'
    assert settings_of(tmp_path, "a.py", text) == {}


def test_a_value_of_a_template_is_no_literal(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: '{{ inputs.a }}'\nb: ${c}\nrun: python t.py --d {{d}} --e 1\n")
    literal = {setting.key: setting.literal for setting in parse(path).settings}
    assert literal == {"a": False, "b": False, "d": False, "e": True, "run": False}


def test_a_dictionary_that_gets_more_from_elsewhere_is_named(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("o = dict(a=1)\no.update(more)\nConfig(**o)\n")
    assert [unread.what for unread in parse(path).unread] == ["what the program adds to o"]


def test_a_sweep_starts_its_program_with_each_value(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("program: t.py\nparameters:\n  b: {values: [2, 3]}\n")
    assert parse(path).started == ["t.py"]
    assert origin_of(tmp_path, "a.yaml", path.read_text(), "b") == ("2", "loop", "one of 2, 3")


def test_a_config_that_a_cell_writes_is_read_there(tmp_path):
    cells = ["%%writefile run.yaml\na: 1\n", "!python t.py --config run.yaml\n"]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source} for source in cells]}))
    parsed = parse(path)
    assert parsed.unread == []
    assert parsed.settings[0] == Setting("a", "1")


def origin_of(folder, name, text, key="a"):
    """The text of the last setting of a key, the kind of its origin and why."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    setting = next(setting for setting in reversed(parse(path).settings) if setting.key == key)
    return setting.text, setting.origin.kind, setting.origin.why


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("for b in [1, 2]:\n    Config(a=b)\n", ("1", "loop", "one of 1, 2")),
        ("for b, c in product([1, 2], x):\n    Config(a=b)\n", ("1", "loop", "one of 1, 2")),
        ("for b, c in [(1, 3), (2, 4)]:\n    Config(a=c)\n", ("3", "loop", "one of 3, 4")),
        ("[Config(a=b) for b in (1, 2)]\n", ("1", "loop", "one of 1, 2")),
        ("def f(b=1):\n    Config(a=b)\n", ("1", "default", "the default of b, an argument of f")),
        ("def f(b=1):\n    Config(a=b)\nf(b=2)\n", ("2", "certain", "")),
        ("def f(x, b):\n    Config(a=b)\nf(0, 2)\n", ("2", "certain", "")),
        ("def f(b):\n    Config(a=b)\nf(1)\nf(2)\n", ("1", "loop", "one of 1, 2")),
        ("def f(b=1):\n    pass\nConfig(a=b)\n", ("b", "certain", "")),
        (
            "@option('--b', default=1)\ndef f(b):\n    Config(a=b)\n",
            ("1", "default", "the default of b, an option of the file"),
        ),
        ("def f(b=Option(1)):\n    Config(a=b)\n", ("1", "default", "the default of b, an argument of f")),
        (
            "DEFINE_float('b', 1, 'help')\nConfig(a=FLAGS.b)\n",
            ("1", "default", "the default of b, an option of the file"),
        ),
        (
            "add_argument('--x', dest='b', default=1)\nConfig(a=o.b)\n",
            ("1", "default", "the default of b, an option of the file"),
        ),
        ("add_argument('--off', action='store_true')\nConfig(a=0 if o.off else 1)\n", ("1", "branch", "if o.off")),
        ("B = 1\nB = get('b', B)\nConfig(a=B)\n", ("1", "default", "the default of B, which the program may replace")),
        ("B = 1\nB = 2\nConfig(a=B)\n", ("B", "certain", "")),
        ("Config(a=0 if unknown else 1)\n", ("0", "branch", "if unknown")),
    ],
)
def test_a_value_of_a_loop_an_argument_or_an_option_is_named_as_one(tmp_path, text, origin):
    assert origin_of(tmp_path, "a.py", text) == origin


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("for b in 1 2; do\nsbatch <<EOF\npython t.py --a $b --c 3\nEOF\ndone\n", ("1", "loop", "one of 1, 2")),
        ('for b in 1 2; do bash -c "python t.py --a $b"; done\n', ("1", "loop", "one of 1, 2")),
        ("B=(1 2)\npython t.py --a ${B[$SLURM_ARRAY_TASK_ID]}\n", ("1", "loop", "one of 1, 2")),
    ],
)
def test_a_command_inside_a_loop_or_an_array_of_jobs_has_the_first_value(tmp_path, text, origin):
    assert origin_of(tmp_path, "a.sh", text) == origin


def test_the_other_words_of_a_command_in_a_loop_are_certain(tmp_path):
    text = "for b in 1 2; do\nsbatch <<EOF\npython t.py --a $b --c 3\nEOF\ndone\n"
    assert origin_of(tmp_path, "a.sh", text, "c") == ("3", "certain", "")


def test_a_config_of_the_launcher_or_that_the_script_writes_is_not_missing(tmp_path):
    path = tmp_path / "a.sh"
    path.write_text(
        "accelerate launch --config_file zero3.yaml t.py --config mine.yaml --config other.yaml\n"
        "cat > mine.yaml <<EOF\na: 1\nEOF\n"
    )
    assert [unread.what for unread in parse(path).unread] == ["the config other.yaml"]


@pytest.mark.parametrize(
    "command",
    [
        "uv run rl @ run.toml",
        "uv run rl @run.toml",
        "uv run trainer --trainer @ run.toml",
        "axolotl train run.yaml",
        "python t.py run.yaml",
    ],
)
def test_a_config_without_an_option_of_its_own_is_not_missed(tmp_path, command):
    path = tmp_path / "a.sh"
    path.write_text(f"cp other.yaml copy.yaml\npython prepare.py data.json\n{command} --b 1\n")
    name = re.search(r"run\.[a-z]+", command)[0]
    assert [unread.what for unread in parse(path).unread] == [f"the config {name}"]


# --- what a file may lead to --------------------------------------------------------------------------------------
def test_base_configs_that_fan_out_end_in_one_line(tmp_path):
    """Twelve files that name each of the others ten times over would be read 12^5 times."""
    names = [f"b{n}" for n in range(12)]
    for name in names:
        (tmp_path / f"{name}.yaml").write_text(f"defaults: {json.dumps(names)}\na: 1\n")
    with pytest.raises(UserError, match="leads to more than 100 other configs"):
        parse(tmp_path / "b0.yaml")


def test_base_configs_of_many_characters_end_in_one_line(tmp_path):
    (tmp_path / "large.yaml").write_text("# " + "x" * 600_000 + "\nb: 1\n")
    (tmp_path / "a.yaml").write_text("defaults: [large, large.yaml]\n")
    with pytest.raises(UserError, match="of more than 1,000,000 characters together"):
        parse(tmp_path / "a.yaml")


@pytest.mark.parametrize("route", ["dots", "absolute", "link", "link to a folder"])
@pytest.mark.parametrize("kind", ["base", "config of a command"])
def test_a_config_from_elsewhere_is_named_and_not_read(tmp_path, route, kind):
    outside = tmp_path / "other" / "secret.yaml"
    outside.parent.mkdir()
    outside.write_text("beta: 0.7\n")
    # Deeper than the folders above a file that are searched.
    folder = tmp_path.joinpath("a", "b", "c", "d", "e", "f", "g")
    folder.mkdir(parents=True)
    (folder / "linked.yaml").symlink_to(outside)
    (folder / "folder").symlink_to(outside.parent)
    names = {
        "dots": "../" * 7 + "other/secret.yaml",
        "absolute": str(outside),
        "link": "linked.yaml",
        "link to a folder": "folder/secret.yaml",
    }
    path = folder / ("a.yaml" if kind == "base" else "a.sh")
    path.write_text(f"defaults: {names[route]}\n" if kind == "base" else f"python t.py --config {names[route]}\n")
    parsed = parse(path)
    assert "0.7" not in [setting.text for setting in parsed.settings]
    assert any(names[route][:100] in unread.what for unread in parsed.unread)


def test_a_base_config_beside_the_file_or_below_it_is_read(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "beside.yaml").write_text("b: 1\n")
    (tmp_path / "below" / "c.yaml").write_text("c: 2\n")
    settings = settings_of(tmp_path, "a.yaml", "defaults: [beside, below/c]\na: 3\n")
    assert settings == {"b": "1", "c": "2", "a": "3"}


def test_a_base_config_above_the_file_is_read_within_its_repository(tmp_path):
    """A chain of recipes, as NeMo-RL has them: each names the one before it, the last a config two folders above."""
    repository = tmp_path / "repository"
    recipes = repository / "configs" / "recipes" / "llm"
    recipes.mkdir(parents=True)
    (tmp_path / "secret.yaml").write_text("secret: 9\n")
    (repository / "configs" / "base.yaml").write_text("defaults: ../../secret.yaml\nb: 1\n")
    (recipes / "0.yaml").write_text("defaults: ../../base.yaml\n")
    for number in range(1, 8):
        (recipes / f"{number}.yaml").write_text(f"defaults: {number - 1}.yaml\n")
    assert settings_of(recipes, "a.yaml", "defaults: 7.yaml\na: 2\n") == {"a": "2"}
    (repository / ".git").mkdir()
    assert settings_of(recipes, "a.yaml", "defaults: 7.yaml\na: 2\n") == {"b": "1", "a": "2"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["code", "markdown", "Config(a=1)"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cells", "cell_type", "source", "attachments", "outputs"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
CELL = st.fixed_dictionaries({"cell_type": st.just("code") | JSON, "source": JSON}, optional={"attachments": JSON})


@h_settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON | st.fixed_dictionaries({"cells": JSON | st.lists(CELL | JSON, max_size=3)}))
def test_any_json_is_a_notebook_or_one_line_about_it(tmp_path, data):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(data), encoding="utf-8")
    try:
        parse(path)
    except UserError as error:
        assert str(error).startswith(("is not a notebook", "cannot be read"))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "3",
        "{}",
        '{"cells": null}',
        '{"cells": NaN}',
        '{"cells": [3]}',
        '{"cells": [{"cell_type": "code", "source": 3}]}',
        '{"cells": [{"cell_type": "code", "source": ["a", null]}]}',
    ],
)
def test_json_of_another_shape_is_no_notebook(tmp_path, text):
    path = tmp_path / "a.ipynb"
    path.write_text(text)
    with pytest.raises(UserError, match="is not a notebook"):
        parse(path)


def test_words_of_the_shell_are_no_programs(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text('export A="$B"\nlocal c=1\neval "swift rlhf --beta 0.1"\nswift export --to words\n')
    words = parse(script).words
    assert words.count("export") == 1, "that of `swift export`"
    assert not {"local", "eval"} & set(words)
