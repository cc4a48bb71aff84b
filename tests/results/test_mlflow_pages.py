"""Links into MLflow's pages: which columns, where they are stored, and that the pages show them."""

import json
import os
import time

import pytest

import browser
from kl_comedy.errors import UserError
from kl_comedy.results.mlflow_pages import VIEW, choose_view
from kl_comedy.results.runs import runs_frame
from kl_comedy.tracking.store import connect
from mlflow_servers import mlflow_server
from study_runs import EVAL, KL


def views(uri):
    """The views that are stored in the study's experiment, by key."""
    tags = connect(uri).get_experiment_by_name("study").tags
    return {key.removeprefix(VIEW): json.loads(text) for key, text in tags.items() if key.startswith(VIEW)}


def test_the_usual_columns_are_the_kl_the_seed_and_what_the_runs_differ_in(study):
    frame = runs_frame(study)
    frame["params.optimizer.lr"] = ["0.1", *["0.2"] * (len(frame) - 1)]
    frame["params.train.steps"] = "80"
    view = choose_view(frame, [], [])
    assert view.columns[:4] == ["tags.kl.label", "tags.kl.verdict", "params.seed", "params.optimizer.lr"]
    assert set(view.columns[4:]) == {f"metrics.{EVAL}", f"metrics.{KL}", "metrics.train/reward"}
    assert list(view.charts) == [EVAL, "train/reward", KL]


def test_columns_can_be_chosen_and_derived_ones_become_their_source(study):
    view = choose_view(runs_frame(study), ["kl.family", "seed", "status"], ["train/*"])
    assert view.columns == ["tags.kl.label", "params.seed", "metrics.train/reward"]
    with pytest.raises(UserError, match="did you mean 'seed'"):
        choose_view(runs_frame(study), ["sead"], [])


def test_a_column_that_two_choices_name_is_shown_once(study):
    view = choose_view(runs_frame(study), ["kl.family", "kl.label", "seed"], [EVAL])
    assert view.columns == ["tags.kl.label", "params.seed", f"metrics.{EVAL}"]


def test_every_chart_is_in_the_section_of_the_view(study):
    state = choose_view(runs_frame(study), [], []).state()
    (section,) = state["compareRunSections"]
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == {section["uuid"]}
    assert len({chart["uuid"] for chart in state["compareRunCharts"]}) == 3


def test_the_link_names_a_view_that_the_experiment_has(kl_comedy, study_copy):
    command = ["results", "link", "--uri", study_copy, "--columns", "seed", "--where", "seed = 1"]
    code, out, err = kl_comedy(*command)
    assert code == 0, err
    runs, charts = out.splitlines()
    ((key, view),) = views(study_copy).items()
    experiment = connect(study_copy).get_experiment_by_name("study").experiment_id
    page = f"http://127.0.0.1:5000/#/experiments/{experiment}/runs"
    assert runs == f"{page}?workflowType=machine_learning&viewStateShareKey={key}"
    assert charts == f"{runs}&compareRunsMode=CHART"
    assert view["selectedColumns"][0] == "params.`seed`"
    assert view["searchFilter"] == "params.`seed` = '1'"
    assert f"mlflow server --backend-store-uri {study_copy}" in err
    # A second time it is the same view; another one is stored beside it.
    assert kl_comedy(*command)[1] == out
    assert len(views(study_copy)) == 1
    runs = kl_comedy("results", "link", "--uri", study_copy, "--server", "http://tracking:5000/")[1].splitlines()[0]
    assert runs.startswith(f"http://tracking:5000/#/experiments/{experiment}/runs?")
    assert len(views(study_copy)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--uri", "export.parquet"], "an export has no pages"),
        ([], "--experiment: these runs are of 2: other, study; name one"),
    ],
)
def test_what_has_no_page_is_refused(kl_comedy, study_copy, options, message):
    client = connect(study_copy)
    client.create_run(client.create_experiment("other"))
    code, _, err = kl_comedy("results", "link", "--uri", study_copy, *options)
    assert code == 2
    assert message in err


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server(study_copy, tmp_path):
    """The address of MLflow's pages of the study."""
    with mlflow_server(study_copy, tmp_path, "--workers", "1") as address:
        yield address


@pytest.fixture
def tab():
    opened = browser.Browser()
    yield opened
    opened.close()


def show(tab, address):
    """Open the address without waiting for it: MLflow's page writes the view into its own address while it loads."""
    tab.ask("Emulation.setDeviceMetricsOverride", width=1800, height=900, deviceScaleFactor=1, mobile=False)
    # From another document, because the two addresses differ after the # alone.
    tab.ask("Page.navigate", url="about:blank")
    tab.ask("Page.navigate", url=address)


def wait_for_text(tab, *texts):
    """Wait until the page shows all of the texts; what it shows."""
    deadline = time.monotonic() + 90
    shown = ""
    while time.monotonic() < deadline:
        shown = tab.evaluate("document.body ? document.body.innerText : ''")
        if all(text in shown for text in texts):
            return shown
        time.sleep(0.3)
    missing = [text for text in texts if text not in shown]
    raise AssertionError(f"the page does not show {missing}: {shown}")


@pytest.mark.slow
@pytest.mark.skipif(
    browser.program() is None and not os.environ.get("KL_COMEDY_NEED_BROWSER"), reason="no Chromium here"
)
def test_in_a_browser_the_links_show_the_columns_and_the_charts(kl_comedy, study_copy, server, tab):
    code, out, err = kl_comedy("results", "link", "--uri", study_copy, "--server", server)
    assert code == 0, err
    runs, charts = out.splitlines()
    show(tab, runs)
    shown = wait_for_text(tab, "kl.label", "kl.verdict", "seed", EVAL, "study s2", "0.05 k3_reverse_token in loss")
    assert "run_folder" not in shown, "a column that nobody chose"
    assert "Judges" not in shown, "what is for agents"
    show(tab, charts)
    shown = wait_for_text(tab, "Overview", EVAL, KL)
    assert shown.index("Overview") < shown.rindex("train/reward")
