"""Tokens of completions in a report: bounded, escaped, and shown in a real browser."""

import json
import os
from types import SimpleNamespace

import pytest

import browser
from kl_comedy.results.runs import open_runs
from kl_comedy.results.token_view import (
    LONGEST_TEXT,
    NONE_STORED,
    NOT_EXPORTED,
    SHOWN_RUNS,
    SHOWN_UPDATES,
    ShownRun,
    viewer_of,
)
from kl_comedy.tracking.logger import RunLogger
from kl_comedy.tracking.tokens import STORED_ROWS
from study_runs import HOSTILE
from token_rows import stored


# --- what a page gets -------------------------------------------------------------------------------------------------
class Tables:
    """A store whose runs have these tables of samples, by update. It counts the runs that it is asked for."""

    def __init__(self, tables_of):
        self.tables_of = tables_of
        self.asked = 0

    def sample_tables(self, run_id, most):
        self.asked += 1
        return list(self.tables_of.get(run_id, {}).items())[:most]


def runs_named(count):
    return [ShownRun(str(number), f"run {number}", "k1") for number in range(count)]


def shown(viewer):
    return {run["name"]: [item["update"] for item in run["updates"]] for run in json.loads(viewer.data)}


def test_hostile_text_cannot_leave_the_script_element():
    row = stored(HOSTILE + "\u2028 <!-- <script>", problem=HOSTILE, answer="</ScRipt> &lt;", status=HOSTILE)
    row["per_token"]["special"]["0"] = HOSTILE
    viewer = viewer_of(Tables({"0": {1: [row]}}), [ShownRun("0", HOSTILE, HOSTILE)])
    assert not set(viewer.data) & set("<>&\u2028")
    (run,) = json.loads(viewer.data)
    assert run["name"] == HOSTILE
    completion = run["updates"][0]["completions"][0]
    assert completion["problem"] == HOSTILE
    assert completion["special"]["0"] == HOSTILE


def test_a_page_has_at_most_so_many_runs_and_updates():
    tables = {str(number): {step: [stored("ab")] for step in range(1, 9)} for number in range(100)}
    store = Tables(tables)
    viewer = viewer_of(store, runs_named(100))
    assert len(shown(viewer)) == SHOWN_RUNS == store.asked
    assert {len(updates) for updates in shown(viewer).values()} == {SHOWN_UPDATES}
    assert viewer.lines[0].startswith(f"{SHOWN_RUNS} of 100 runs, at most {SHOWN_UPDATES} updates of each")


def test_an_update_has_at_most_so_many_completions_and_a_completion_so_much_text():
    rows = [stored("ab", problem="x" * 5000, answer="y" * 5000) for _ in range(20)]
    viewer = viewer_of(Tables({"0": {1: rows}}), runs_named(1))
    completions = json.loads(viewer.data)[0]["updates"][0]["completions"]
    assert len(completions) == STORED_ROWS
    for completion in completions:
        assert len(completion["problem"]) <= LONGEST_TEXT
        assert len(completion["answer"]) <= LONGEST_TEXT


def test_runs_without_tokens_are_not_asked_for_without_end():
    store = Tables({})
    viewer = viewer_of(store, runs_named(5000))
    assert (viewer.data, viewer.lines) == ("", [NONE_STORED])
    assert store.asked <= 60


def test_bytes_are_bounded_and_shared_by_the_runs():
    tables = {str(number): {step: [stored("ab" * 50)] for step in (1, 4, 8)} for number in range(4)}
    whole = viewer_of(Tables(tables), runs_named(4))
    most = len(whole.data) // 2
    viewer = viewer_of(Tables(tables), runs_named(4), most_bytes=most)
    assert len(viewer.data) < most + 4 * 100
    # The last update of every run comes before the second of any.
    assert all(8 in updates for updates in shown(viewer).values())
    assert len(shown(viewer)) == 4
    omitted = 12 - sum(len(updates) for updates in shown(viewer).values())
    assert omitted > 0
    assert viewer.lines[1].startswith(f"{omitted} more updates are left out")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("use", "tttx"),
        ("use", "t"),
        ("use", "ttttt"),
        ("k1_reverse", [1.0]),
        ("k1_reverse", [1.0] * 5),
        ("exact_reverse", [1.0] * 5),
        ("log_ratio", None),
        ("special", {"a": "b"}),
        ("text", 5),
    ],
)
def test_damaged_tokens_are_left_out(place, value):
    row = stored("abc")
    row["per_token"][place] = value
    viewer = viewer_of(Tables({"0": {1: [row, stored("fine")]}}), runs_named(1))
    assert len(json.loads(viewer.data)[0]["updates"][0]["completions"]) == 1


def test_infinities_reach_the_page():
    row = stored("a")
    # As the spool writes them.
    row["per_token"]["log_ratio"] = ["-inf", "nan"]
    viewer = viewer_of(Tables({"0": {1: [row]}}), runs_named(1))
    assert json.loads(viewer.data)[0]["updates"][0]["completions"][0]["log_ratio"] == ["-Infinity", "NaN"]


# --- reports ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two tracked runs of one configuration: tokens at four updates, of which one lacks exact KL, and at one."""
    folder = tmp_path_factory.mktemp("tokens")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    # Two seeds: of a configuration's runs with one seed, a report has the newest.
    for seed, (name, steps) in enumerate([("first", (1, 4, 8, 12)), ("second", (4,))]):
        tracking = SimpleNamespace(uri=uri, experiment="tokens", tags={})
        params = {"name": name, "seed": seed}
        logger = RunLogger(tracking, run_dir=folder / name, params=params, tags={"kl.label": "no KL"})
        for step in steps:
            rows = [
                stored(f"{name} {step}\n" + "word " * 80, value=step / 10),
                stored(HOSTILE, group=1, value=-0.5, problem=HOSTILE),
                stored("a\U0001f600", group=1, reward=0.0),
            ]
            for letter, row in zip("ozm", rows, strict=True):
                row["per_token"]["use"] = letter + row["per_token"]["use"][1:]
                if step == 8:
                    row["per_token"]["exact_reverse"] = None
            logger.log_metrics({"train/reward": step / 10}, step)
            logger.log_table("samples", [*rows, {"problem": "without tokens"}], step)
        logger.finish()
    return uri


@pytest.fixture(scope="module")
def page(store, tmp_path_factory):
    from commands import run_here

    out = tmp_path_factory.mktemp("page") / "tokens.html"
    words = ["--uri", store, "--group", "kl.label", "--metric", "train/reward", "--out", out]
    code, _, errors = run_here("results", "report", *words)
    assert code == 0, errors
    return out


def test_a_report_holds_the_tokens_of_its_runs(page):
    text = page.read_text()
    assert HOSTILE not in text
    assert text.count("<script>") == 1
    data = text.split('id="viewer-data">')[1].split("</script>")[0]
    updates = {}
    for run in json.loads(data):
        updates[run["name"]] = [item["update"] for item in run["updates"]]
    assert sorted(updates.values()) == [[1, 4, 8, 12], [4]]
    assert "2 of 2 runs, at most 4 updates of each" in text


def test_the_completions_of_a_page_and_an_export_have_no_tokens(store, kl_comedy, tmp_path):
    runs = open_runs(store)
    run_id = runs.frame()["run_id"][0]
    assert runs.sample_tables(run_id, 4)
    assert all("per_token" not in row for row in runs.completions(run_id))
    export = tmp_path / "export.parquet"
    assert kl_comedy("results", "export", "--uri", store, "--out", export)[0] == 0
    words = ["--group", "kl.label", "--metric", "train/reward", "--out", tmp_path / "page.html"]
    assert kl_comedy("results", "report", "--uri", export, *words)[0] == 0
    text = (tmp_path / "page.html").read_text()
    assert NOT_EXPORTED in text
    assert 'id="viewer-data"' not in text


def test_a_damaged_table_does_not_cost_the_report(store, tmp_path, caplog):
    runs = open_runs(store)
    run_id = next(run_id for run_id in runs.frame()["run_id"] if len(runs.sample_tables(run_id, 4)) == 4)
    (path,) = [path for path, step in runs._tables(run_id, "tables/samples").items() if step == 1]
    from kl_comedy.results.database import artifact_folder

    file = artifact_folder(runs._client, run_id) / path
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:100])
        assert [step for step, _ in runs.sample_tables(run_id, 4)] == [4, 8, 12]
    finally:
        file.write_bytes(whole)


def test_a_table_that_a_server_does_not_send_does_not_cost_the_report(store, monkeypatch):
    runs = open_runs(store)
    run_id = next(run_id for run_id in runs.frame()["run_id"] if len(runs.sample_tables(run_id, 4)) == 4)
    monkeypatch.setattr("kl_comedy.results.database.artifact_folder", lambda client, run_id: None)
    download = runs._client.download_artifacts

    def loses_the_first(run_id, path, folder):
        if path.endswith("/1.json"):
            raise OSError("connection reset by peer")
        return download(run_id, path, folder)

    monkeypatch.setattr(runs._client, "download_artifacts", loses_the_first)
    assert [step for step, _ in runs.sample_tables(run_id, 4)] == [4, 8, 12]


# --- in a browser -----------------------------------------------------------------------------------------------------
def needs_browser(test):
    absent = browser.program() is None and not os.environ.get("KL_COMEDY_NEED_BROWSER")
    return pytest.mark.slow(pytest.mark.skipif(absent, reason="no Chromium here")(test))


@pytest.fixture(scope="module")
def tab():
    opened = browser.Browser()
    yield opened
    opened.close()


def press(tab, key):
    tab.ask("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
    tab.ask("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)


def choose(tab, name, text):
    """Choose the option that begins with ``text``, as a user does."""
    options = f"[...document.getElementById('viewer-{name}').options]"
    value = tab.evaluate(f"{options}.find((option) => option.textContent.startsWith({json.dumps(text)})).value")
    field = f"document.getElementById('viewer-{name}')"
    tab.evaluate(f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('change')); 0")


def open_viewer(tab, page, width):
    tab.open(page.as_uri(), width, 800)
    tab.evaluate("document.getElementById('viewer').open = true")


FACTS = "document.getElementById('viewer-facts').textContent"
TEXT = "document.getElementById('viewer-completions').textContent"


@needs_browser
def test_run_update_and_token_are_chosen(tab, page):
    open_viewer(tab, page, 1280)
    choose(tab, "run", "first")
    assert tab.evaluate("[...document.getElementById('viewer-update').options].map((o) => o.textContent)") == [
        "1",
        "4",
        "8",
        "12",
    ]
    choose(tab, "update", "1")
    assert "first 1" in tab.evaluate(TEXT)
    choose(tab, "update", "4")
    choose(tab, "run", "second")
    assert "second 4" in tab.evaluate(TEXT)
    assert tab.evaluate("document.querySelectorAll('[role=listbox]').length") == 3
    assert tab.evaluate("window.hacked") is None
    assert tab.errors == []
    assert HOSTILE in tab.evaluate(TEXT), "as text"

    # The pointer.
    place = tab.evaluate(
        "(() => { const token = document.querySelectorAll('.tokens .token')[1];"
        "token.scrollIntoView({block: 'center'}); const box = token.getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    tab.ask("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    expected = 'Token 2 of 410: "e" · KL k1 0.4 nats · exact KL 0.4 nats · ratio to the sampler 1.492 · trained on · '
    assert tab.evaluate(FACTS) == expected + "reward 1"

    # The keyboard: one stop for a completion, then along it.
    tab.evaluate("document.querySelectorAll('.tokens')[2].firstChild.focus()")
    assert "masked by a policy correction" in tab.evaluate(FACTS)
    press(tab, "ArrowRight")
    assert "Token 2 of 6" in tab.evaluate(FACTS)
    assert "a part of the character that a later token completes" in tab.evaluate(FACTS)
    press(tab, "End")
    assert 'Token 6 of 6: "<end>"' in tab.evaluate(FACTS)
    assert tab.evaluate("document.querySelectorAll('.tokens [tabindex=\"0\"]').length") == 3
    assert tab.evaluate("document.querySelectorAll('[aria-selected=true]').length") == 1
