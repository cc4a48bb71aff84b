"""What a launch file sets, by its syntax: settings with their origin, and what it leaves to others."""

import json

import pytest

from kl_comedy.lab.launch_syntax import parse


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


def test_flags_of_an_array_that_no_command_gets_come_before_those_of_commands(tmp_path):
    path = tmp_path / "a.sh"
    path.write_text("python t.py --a 1\nMORE=(--a 2 --b 3)\n")
    assert [(setting.key, setting.text) for setting in parse(path).settings] == [("a", "2"), ("b", "3"), ("a", "1")]


def test_help_and_docstrings_are_no_commands(tmp_path):
    text = '"""Run with --a 1 and --b 2."""\nparser.add_argument("--c", help="as --c 3 --d 4")\n'
    assert settings_of(tmp_path, "a.py", text) == {}
