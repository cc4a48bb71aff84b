"""Rules of planted bugs: what a pattern matches, what becomes of it, and that no renaming hides its place."""

import ast
import re

import pytest
from tests.mutation_rules import places, replaced

SOURCE = '''"""A module."""

def reward(costs, cap, *, weight):
    """The reward of a batch."""
    bounded = min(costs.sum(-1), cap)
    return combine(bounded=bounded, weight=weight * bounded)


def other(costs, cap):
    return min(cap, cap)
'''


@pytest.fixture
def package(tmp_path):
    (tmp_path / "rewards.py").write_text(SOURCE)
    (tmp_path / "flags.yaml").write_text("form: {a: 1, b: 2}\n")
    return tmp_path


def planted(package, old, new, inside=None):
    """The lines that differ in the one file with the bug, each before and after."""
    (place,) = places(old, package, inside)
    lines = zip(place.file.read_text().splitlines(), replaced(place, new).splitlines(), strict=True)
    return [(before, after) for before, after in lines if before != after]


def test_two_names_may_stand_for_two_things(package):
    assert len(list(places("min($a, $b)", package))) == 2


def test_a_name_stands_for_the_same_thing_everywhere(package):
    assert [place.bindings for place in places("min($a, $a)", package)] == [{"META_a": "cap"}]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("min($x.sum(-1), $y)", "max($x.sum(-1), $y)", "    bounded = (max(costs.sum(-1), cap))"),
        (
            "$f(bounded=$b, weight=$w * $b)",
            "$f(bounded=$b, weight=$w)",
            "    return (combine(bounded=bounded, weight=weight))",
        ),
        ("keyword: weight=$w * $b", "keyword: weight=$b", "    return combine(bounded=bounded, weight=bounded)"),
        ("$b = min($x.$sum(-1), $y)", "$b = $x.$sum(-1)", "    bounded = costs.sum(-1)"),
        ("text: {a: 1, b: 2}", "text: {a: 1}", "form: {a: 1}"),
    ],
    ids=["an expression", "a call with keywords", "a keyword", "a statement", "a text"],
)
def test_what_matches_is_replaced(package, old, new, expected):
    ((_, after),) = planted(package, old, new)
    assert after == expected


def test_inside_chooses_between_functions(package):
    ((before, _),) = planted(package, "min($a, $b)", "$b", inside="The reward of a batch")
    assert "costs.sum" in before


def test_inside_that_is_nowhere_chooses_nothing(package):
    assert list(places("min($a, $b)", package, inside="no such words")) == []


@pytest.fixture
def place(package):
    (place,) = places("min($x.sum(-1), $y)", package)
    return place


def test_a_replacement_with_a_name_of_its_own_is_refused(place):
    with pytest.raises(ValueError, match=r"\$z"):
        replaced(place, "$z")


def test_a_replacement_that_is_no_python_is_refused(place):
    with pytest.raises(SyntaxError):
        replaced(place, "$x $y")


class Renamed(ast.NodeTransformer):
    """Every variable, argument and function of the module under another name."""

    def visit_Name(self, node):
        if node.id in ("min", "combine"):  # they come from elsewhere
            return node
        return ast.Name(f"new_{node.id}", node.ctx)

    def visit_arg(self, node):
        return ast.arg(f"new_{node.arg}")

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.name = f"new_{node.name}"
        return node


def test_a_rename_of_variables_functions_and_files_hides_no_place(package):
    rule = ("min($x.sum(-1), $y)", "max($x.sum(-1), $y)")
    ((_, before),) = planted(package, *rule)
    renamed = ast.unparse(Renamed().visit(ast.parse(SOURCE)))
    (package / "rewards.py").unlink()
    (package / "costs.py").write_text(renamed)
    ((_, after),) = planted(package, *rule)
    assert re.sub("new_", "", after) == before
