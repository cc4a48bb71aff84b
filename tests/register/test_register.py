"""The stored register: every row has its code or says that it has none, and its pages are those of its data."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from register import run, which_flag
from register.measure import FRESH, verdict
from register.page import (
    BEGIN,
    END,
    error_text,
    generated,
    holes_text,
    issue,
    made_by_text,
    objective,
    percent,
    script,
    table,
    write_rows,
)
from register.run import (
    NOT_REBUILT,
    OURS,
    RELEASED,
    _loss,
    _rounded,
    changes,
    keep_results,
    main,
    rows_of,
    run_all,
    run_rows,
    store_rows,
    wheel_of,
)
from register.which_flag import sizes

from kl_comedy.kl import KLTerm

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "results" / "register"


@pytest.fixture(scope="module")
def rows():
    return json.loads((STORED / "register.json").read_text())


def test_there_are_25_systems_and_15_rows_of_released_code(rows):
    assert len({row["system"] for row in rows}) >= 25
    released = [row for row in rows if row["made_by"] == RELEASED]
    assert len(released) >= 15
    for row in released:
        assert len(row["sha256"]) == 64, row["id"]
        assert row["function"], row["id"]


def test_the_stored_rows_are_those_that_are_written(rows):
    """A row that was added or whose texts were changed is stored by the command, not by hand."""
    written = rows_of()
    assert [row["id"] for row in rows] == [row["id"] for row in written]
    for stored, row in zip(rows, written, strict=True):
        for name in ("flags", "intended", "fix", "issue", "call", "ours", "fixed", "form", "form_fixed"):
            assert stored.get(name, "") == row.get(name, ""), (row["id"], name)


def test_a_row_of_a_commit_names_it_in_full():
    for row in rows_of():
        if "repository" in row:
            assert len(row["commit"]) == 40, row["id"]
        else:
            assert row.get("case") or row["version"], row["id"]
        assert row["fix"], row["id"]


def test_rows_with_an_issue_have_a_mistake_and_a_text(rows):
    names = {path.stem for path in (STORED / "issues").glob("*.md")}
    assert names == {row["id"] for row in rows if row["issue"]}
    for row in rows:
        if not row["issue"]:
            continue
        leaks = bool(row["holes"]) and (row["holes"]["change"] > 0 or row["holes"]["reached"])
        assert row["fresh"]["target"] != row["intended"] or leaks, row["id"]
        text = issue(row)
        assert (STORED / "issues" / f"{row['id']}.md").read_text() == text
        # A reader who does not know the table gets the reason, and no words that point to it.
        assert "**Why.** " in text, row["id"]
        assert "has a name here" not in text, row["id"]


def test_every_fix_that_is_measured_optimizes_what_is_meant(rows):
    measured = [row for row in rows if row.get("fixed_fresh")]
    assert len(measured) >= 30
    for row in measured:
        assert row["fixed_fresh"]["target"] == row["intended"], row["id"]
        assert row["fixed_stale"]["error"] <= row["stale"]["error"], row["id"]
        assert not row["fixed_holes"]["change"], row["id"]


def test_the_program_of_an_issue_shows_the_mistake_and_the_fix(rows):
    shown = 0
    for row in rows:
        if not row["form"]:
            continue
        program = "\n".join(script(row)[1:-1])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, {})
        released, fixed = map(float, printed.getvalue().split())
        assert released > 0.05, row["id"]
        assert fixed < 1e-9, row["id"]
        shown += 1
    assert shown >= 10


def test_the_page_is_that_of_the_data(rows):
    text = (STORED / "README.md").read_text()
    by_hand = json.loads((STORED / "by_hand.json").read_text())
    between = text.partition(BEGIN)[2].partition(END)[0]
    assert between.strip() == generated(rows, by_hand).strip()


def answers_of(system):
    """The numbers of all answers of a system, the first flag changing slowest, found as the page's script finds one."""
    numbers = []
    for choices in itertools.product(*[range(len(flag["options"])) for flag in system["flags"]]):
        place = 0
        for rows, choice in zip(system["steps"], choices, strict=True):
            place = rows[place][choice]
        numbers.append(place)
    return numbers


def test_the_form_has_an_answer_for_every_choice():
    data = json.loads((STORED / "which_flag.json").read_text())
    assert len(data["systems"]) >= 25
    for name, system in data["systems"].items():
        for flag, rows in zip(system["flags"], system["steps"], strict=True):
            assert {len(row) for row in rows} == {len(flag["options"])}, name
        assert max(answers_of(system)) < len(data["answers"]), name
    assert max(number for answer in data["answers"] for number in answer) < len(data["lines"])


def test_the_form_gives_the_answer_of_explain():
    from register.which_flag import _answer, offered, options_of

    from kl_comedy.peers.systems import SYSTEMS

    data = json.loads((STORED / "which_flag.json").read_text())
    for name, wanted in (("tunix", 100), ("oat", 5), ("rlinf", 17)):
        system = SYSTEMS[name]
        place = wanted
        given = {}
        for flag in reversed(offered(system)):
            options = options_of(flag)
            given[flag.name] = options[place % len(options)]
            place //= len(options)
        stored = data["answers"][answers_of(data["systems"][name])[wanted]]
        assert [data["lines"][number] for number in stored] == _answer(system, given)


def test_a_bar_does_not_end_a_cell(rows):
    (_, _, line) = table([{**rows[0], "flags": "a|b", "fix": "use c|d", "issue": ""}])
    assert "`a\\|b`" in line
    assert "use c\\|d" in line
    assert line.replace("\\|", "").count("|") == 11


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.0003468, "0.035 %"), (0.994, "99 %"), (0.999, "100 %"), (1.5, "150 %"), (None, "not finite")],
)
def test_an_error_is_a_percentage_of_two_digits_below_one_hundred(share, text):
    assert percent(share) == text


def test_stored_figures_have_four_digits_and_no_rounding_of_zero():
    figures = {"error": 1e-9, "coefficient": 0.123456, "cosine": float("nan"), "silent": False, "target": "zero"}
    expected = {"error": 0.0, "coefficient": 0.1235, "cosine": None, "silent": False, "target": "zero"}
    assert _rounded(figures) == expected


def test_the_form_has_every_combination_up_to_its_bound():
    data = json.loads((STORED / "which_flag.json").read_text())
    combinations = sizes()
    options = {name: [len(flag["options"]) for flag in system["flags"]] for name, system in data["systems"].items()}
    assert {name: math.prod(counts) for name, counts in options.items()} == combinations
    assert max(combinations.values()) <= 30_000


def test_the_form_of_the_smallest_system_is_the_stored_one(monkeypatch):
    """The others take minutes; the order of their answers is made by the same lines."""
    combinations = sizes()
    several = [name for name, count in combinations.items() if count >= 12]
    smallest = min(several, key=lambda name: combinations[name])
    monkeypatch.setattr(which_flag, "NAMES", (smallest,))
    made = which_flag.answers()
    stored = json.loads((STORED / "which_flag.json").read_text())

    def texts(data):
        answers = [data["answers"][number] for number in answers_of(data["systems"][smallest])]
        return [[data["lines"][number] for number in answer] for answer in answers]

    made = json.loads(json.dumps(made))
    assert texts(made) == texts(stored)
    assert made["systems"][smallest]["flags"] == stored["systems"][smallest]["flags"]


def test_the_form_answers_for_the_regimes_in_which_a_reading_holds():
    terms = (KLTerm(estimator="k2", placement="loss", beta=0.1),)
    reading = SimpleNamespace(holds_in=("on_policy",), certified_terms=lambda: terms)
    (line,) = which_flag._verdicts(reading)
    assert line.startswith("on_policy: ")


# --- what changed since -------------------------------------------------------------------------------------------
def test_changes_say_what_differs_and_nothing_else(rows):
    assert changes(rows, rows) == []
    moved = json.loads(json.dumps(rows))
    moved[0]["sha256"] = "0" * 64
    moved[0]["fresh"]["target"] = "token_forward"
    moved[1]["stale"]["error"] = 0.9
    moved[2]["not_rebuilt"] = "no clone of a/b"
    del moved[3]
    moved.append({**moved[4], "id": "new-row"})
    lines = changes(rows, moved)
    assert any(line.startswith("new-row: new row") for line in lines)
    assert f"{rows[3]['id']}: row is gone" in lines
    assert any(line.startswith(f"{rows[0]['id']}: sha256 is") for line in lines)
    assert f"{rows[0]['id']}, fresh: target is token_forward, was token_reverse" in lines
    assert any(line.startswith(f"{rows[1]['id']}, stale: error is 0.9") for line in lines)
    assert f"{rows[2]['id']}: not rebuilt since {rows[2]['rebuilt']} (no clone of a/b)" in lines
    assert len(lines) == 6


def test_a_change_of_the_fix_or_of_a_leak_is_said(rows):
    moved = json.loads(json.dumps(rows))
    moved[0]["fix"] = "another"
    with_holes = next(number for number, row in enumerate(moved) if row.get("holes"))
    moved[with_holes]["holes"]["change"] += 0.5
    lines = changes(rows, moved)
    assert any(line.startswith(f"{rows[0]['id']}: fix is 'another'") for line in lines)
    assert any(line.startswith(f"{rows[with_holes]['id']}, holes: change is ") for line in lines)
    assert len(lines) == 2


def test_rounding_of_another_processor_is_no_change(rows):
    moved = json.loads(json.dumps(rows))
    for row in moved:
        if row.get("fresh"):
            row["fresh"]["error"] *= 1 + 1e-5
    assert changes(rows, moved) == []


# --- without the sources --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def without_sources():
    """Two rows of a commit without its clone: the second has no formula of ours."""
    by_id = {row["id"]: row for row in rows_of()}
    return run_rows([by_id["slime-k3"], by_id["miles-plus-plus"]], sources=None)


def test_a_row_without_its_source_is_made_by_our_formula_or_not_rebuilt(without_sources):
    ours, none = without_sources
    assert (ours["made_by"], ours["fresh"]["target"]) == (OURS, "token_forward")
    assert ours["not_rebuilt"] == none["not_rebuilt"] == "no --sources given"
    assert none["made_by"] == NOT_REBUILT
    assert made_by_text(none) == "not rebuilt: no --sources given"
    assert objective(none.get("fresh")) == error_text(none) == "not rebuilt"
    assert holes_text(none) == "not tried"


def test_a_stored_result_outlives_a_run_without_its_source(rows, without_sources):
    stored = {row["id"]: row for row in rows}
    for row in keep_results(rows, without_sources):
        old = stored[row["id"]]
        assert row == {**old, "not_rebuilt": "no --sources given"}
        assert made_by_text(row) == f"released code, not rebuilt since {old['rebuilt']}: no --sources given"
    # The first run of a register has nothing to keep.
    assert keep_results([], without_sources) == without_sources


def test_a_run_of_the_source_replaces_what_was_stored(rows):
    old = next(row for row in rows if row["made_by"] == RELEASED)
    again = {**old, "version": "9.9", "not_rebuilt": ""}
    assert keep_results([{**old, "not_rebuilt": "no clone"}], [again]) == [again]
    # A row that has no source any more is our formula from now on.
    ours = {**old, "made_by": OURS, "not_rebuilt": ""}
    assert keep_results([old], [ours]) == [ours]


def test_the_texts_of_a_row_are_those_that_are_written_though_it_was_not_rebuilt(rows, without_sources):
    (kept,) = keep_results(rows, [{**without_sources[0], "fix": "another fix"}])
    assert kept["fix"] == "another fix"
    assert kept["made_by"] == RELEASED


def test_a_full_run_without_sources_writes_the_stored_rows(tmp_path, monkeypatch, rows, without_sources):
    by_id = {row["id"]: row for row in (*rows, *without_sources)}
    monkeypatch.setattr(run, "run_all", lambda sources, use_newest=False: [by_id[row["id"]] for row in rows])
    (tmp_path / "by_hand.json").write_bytes((STORED / "by_hand.json").read_bytes())
    monkeypatch.setattr("register.page.write", write_rows)
    (tmp_path / "register.json").write_bytes((STORED / "register.json").read_bytes())
    assert main(["--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "register.json").read_text())
    assert [row["made_by"] for row in written] == [row["made_by"] for row in rows]
    assert [row.get("fresh") for row in written] == [row.get("fresh") for row in rows]
    page = (tmp_path / "README.md").read_text()
    assert "; 2 not rebuilt in the last run." in page
    assert page.count("not rebuilt since") == 2


def test_a_system_whose_process_ends_keeps_the_rows_of_the_others(monkeypatch):
    written = [row for row in rows_of() if row["id"] in ("grpo-paper", "polgrad-k3")]
    monkeypatch.setattr(run, "rows_of", lambda: written)

    def ended(command, **options):
        made = json.dumps([{"id": "grpo-paper", "not_rebuilt": ""}])
        is_wheel = "polgrad-k3" in command
        return subprocess.CompletedProcess(command, 1, "" if is_wheel else made, "Fatal: memory" if is_wheel else "")

    monkeypatch.setattr(subprocess, "run", ended)
    by_id = {row["id"]: row for row in run_all(None)}
    assert by_id["polgrad-k3"]["made_by"] == NOT_REBUILT
    assert by_id["polgrad-k3"]["not_rebuilt"] == "Fatal: memory"
    assert by_id["grpo-paper"]["not_rebuilt"] == ""


def test_our_formula_gives_what_the_released_code_gave(rows):
    """Every re-implementation of a source is checked against the stored row of the released code."""
    stored = {row["id"]: row for row in rows}
    checked = 0
    for row in rows_of():
        if "repository" not in row or not row.get("ours"):
            continue
        released = stored[row["id"]]["fresh"]
        ours = verdict(_loss(row["ours"], None), FRESH, intended=row["intended"])
        assert ours.target == released["target"], row["id"]
        assert ours.error == pytest.approx(released["error"], rel=1e-3, abs=1e-5), row["id"]
        checked += 1
    assert checked >= 25


def test_code_that_fails_says_so_in_its_row():
    row = {**next(row for row in rows_of() if row["id"] == "tunix"), "ours": "undefined_name(logp)"}
    (broken,) = run_rows([row], sources=None)
    assert broken["made_by"] == NOT_REBUILT
    assert broken["not_rebuilt"].startswith("NameError: name 'undefined_name'")


def test_single_rows_go_into_the_register_in_its_order(tmp_path, rows):
    for name in ("register.json", "by_hand.json", "README.md"):
        (tmp_path / name).write_bytes((STORED / name).read_bytes())
    changed = {**rows[1], "version": "9.9"}
    store_rows(tmp_path, [changed])
    stored = json.loads((tmp_path / "register.json").read_text())
    assert [row["id"] for row in stored] == [row["id"] for row in rows]
    assert stored[1]["version"] == "9.9"
    assert "| 9.9 |" in (tmp_path / "README.md").read_text()


def test_rows_are_stored_with_the_texts_that_are_written_and_the_page_keeps_its_own(tmp_path, rows):
    for name in ("register.json", "by_hand.json"):
        (tmp_path / name).write_bytes((STORED / name).read_bytes())
    (tmp_path / "README.md").write_text(f"# Mine\n\nbefore\n{BEGIN}\nold\n{END}\nafter\n")
    (tmp_path / "issues").mkdir()
    (tmp_path / "issues" / "solved.md").write_text("an issue that no row has")
    store_rows(tmp_path, [{**rows[1], "fix": "of an earlier day"}])
    stored = json.loads((tmp_path / "register.json").read_text())
    assert stored[1]["fix"] == rows_of()[1]["fix"]
    names = {path.stem for path in (tmp_path / "issues").iterdir()}
    assert names == {row["id"] for row in rows if row["issue"]}
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("# Mine\n\nbefore\n")
    assert page.endswith(f"{END}\nafter\n")
    assert "old" not in page.partition(BEGIN)[2].partition("| system |")[0]


def test_only_takes_the_row_of_that_name_before_those_that_begin_so(monkeypatch, capsys):
    ids = [row["id"] for row in rows_of()]
    name = next(one for one in ids if any(other != one and other.startswith(one) for other in ids))
    monkeypatch.setattr("register.run.run_rows", lambda chosen, sources: [{"id": row["id"]} for row in chosen])
    assert main(["--only", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"id": name}]
    beginning = name[:-1]
    assert main(["--only", beginning, "--json"]) == 0
    chosen = [row["id"] for row in json.loads(capsys.readouterr().out)]
    assert chosen == [one for one in ids if one.startswith(beginning)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--newest"], "--newest: is for --changes and --only"),
        (["--only", "nothing-like-this"], "--only: got 'nothing-like-this'; allowed: trl-grpo"),
        (["--sources", "/nowhere"], "--sources: got '/nowhere'; no such folder"),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, says):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(says)


def test_the_wheel_of_a_row_is_that_of_its_case():
    assert wheel_of({"case": "verl:reward/gdpo/kl"}) == "verl"
    assert wheel_of({"repository": "a/b"}) == ""
