"""The Python API: its names, and that it says what the commands of the same name say."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import kl_comedy
from kl_comedy import KLTerm, api, certify, check_loss, explain, kl_surrogate, results_table
from kl_comedy.errors import UserError
from kl_comedy.registry import ESTIMATORS

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "results" / "evidence" / "export.parquet"


def test_the_names_are_those_of_the_page_on_what_is_stable():
    page = (ROOT / "docs" / "stability.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| Python |")]
    names = re.findall(r"`(\w+)`", row)
    assert sorted(names) == kl_comedy.__all__


def test_names_that_are_not_loaded_yet_are_listed():
    assert set(kl_comedy.__all__) <= set(dir(kl_comedy))


def test_dir_lists_the_public_names_and_nothing_else():
    listed = [name for name in dir(kl_comedy) if not name.startswith("__")]
    assert listed == sorted(kl_comedy.__all__)
    assert {"__version__", "__doc__", "__file__", "__name__", "__path__"} <= set(dir(kl_comedy))


def texts_of_html(html, tag):
    """The texts of the elements ``tag``, by the parser of the standard library's XML: the markup must be closed too."""
    return ["".join(element.itertext()) for element in ElementTree.fromstring(f"<div>{html}</div>").iter(tag)]


def test_a_notebook_shows_a_certificate_as_a_table():
    certified = certify("grpo", regimes=["on_policy", "off_policy"])
    html = certified._repr_html_()
    cells = texts_of_html(html, "td")
    assert cells[0::3] == ["on_policy", "off_policy"]
    assert cells[1::3] == ["token_forward", "proper_loss"]
    assert cells[2::3] == [certificate.verdict for certificate in certified.certificates.values()]


def test_a_notebook_shows_an_explanation_as_a_table_and_sentences():
    explanation = explain(f"verl:{VERL_FLAG}")
    html = explanation._repr_html_()
    assert texts_of_html(html, "td")[0::3] == ["on_policy", "off_policy", "mixed"]
    assert texts_of_html(html, "li") == [*explanation.notes, *explanation.no_ops, *explanation.what_to_use]
    assert "<table>" not in explain("none")._repr_html_()


HOSTILE = "<script>alert('x')</script> & \"y\""


@pytest.mark.parametrize("change", ["title", "sentence", "cell"])
def test_what_a_notebook_shows_is_escaped(change):
    explanation = explain("grpo")
    if change == "title":
        changed = replace(explanation, text=HOSTILE)
    elif change == "sentence":
        changed = replace(explanation, notes=(HOSTILE,))
    else:
        changed = replace(explanation, certificates={HOSTILE: explanation.certificates["on_policy"]})
    html = changed._repr_html_()
    assert "<script" not in html
    tag = {"title": "code", "sentence": "li", "cell": "td"}[change]
    assert HOSTILE in texts_of_html(html, tag)


def test_a_misspelled_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="certfy"):
        kl_comedy.certfy  # noqa: B018


@pytest.mark.parametrize("name", kl_comedy.__all__)
def test_every_name_is_documented_with_an_example(name):
    text = inspect.getdoc(getattr(kl_comedy, name))
    assert text
    # The examples of check_loss are those of docs/conformance.md.
    if name != "check_loss":
        assert ">>>" in text


def test_a_name_loads_only_what_it_needs():
    script = (
        "import sys, kl_comedy\n"
        "assert 'torch' not in sys.modules\n"
        "from kl_comedy import KLTerm, kl_surrogate\n"
        "print(sorted(name for name in sys.modules if name.startswith('kl_comedy.')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "kl_comedy.api" not in done.stdout
    assert "kl_comedy.kl.oracle" not in done.stdout


def command(*words):
    """What a command prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "kl_comedy.cli", *words, "--format", "json"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "name", ["grpo", *[pytest.param(name, marks=pytest.mark.slow) for name in ("rb/per_decision", "comedy/k3_both")]]
)
def test_certify_gives_the_certificates_of_the_command(name):
    rows = command("certify", name)
    certified = certify(name)
    assert certified.ok
    assert list(certified.certificates) == [row["regime"] for row in rows]
    for row in rows:
        # Through JSON as the command's, so that tuples are lists.
        certificate = json.loads(json.dumps(certified.certificates[row["regime"]].row()))
        assert {key: row[key] for key in certificate} == certificate


def test_certify_certifies_the_regimes_that_are_asked_for():
    assert list(certify("grpo", regimes=["mixed", "on_policy"]).certificates) == ["mixed", "on_policy"]


def test_certify_refuses_an_unknown_regime():
    with pytest.raises(UserError, match=r"regimes: got 'onpolicy'.*did you mean 'on_policy'"):
        certify("grpo", regimes=["onpolicy"])


@pytest.mark.parametrize("function", [certify, explain])
def test_the_name_of_an_estimator_is_answered_with_a_term(function):
    with pytest.raises(UserError, match=r"^(terms|what): got 'k3', an estimator.*KLTerm\('k3', placement='loss'\)"):
        function("k3")


def test_a_prompt_shows_verdicts(capsys):
    """A line per regime, and none of the record behind it."""
    shown = repr(certify("grpo", regimes=["on_policy"])).splitlines()
    assert shown[0] == "grpo"
    assert shown[1].startswith("on_policy: optimizes the forward KL of each visited prefix")
    assert len(shown) == 2
    assert "KLTerm" not in repr(explain("grpo"))


def test_certify_says_which_claim_is_false(monkeypatch):
    ESTIMATORS.load()
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS._entries))

    @kl_comedy.register_estimator("half", source="this test", claims=("pathwise:token_reverse",))
    def half(log_ratio):
        """Half the log-ratio, whose gradient is noise."""
        return 0.5 * log_ratio

    certified = certify(KLTerm("half", placement="loss"))
    assert not certified.ok
    assert "on_policy: claims token_reverse" in "\n".join(certified.false_claims)
    with pytest.raises(AssertionError, match="claims that do not hold"):
        certified.assert_ok()


VERL_FLAG = "actor_rollout_ref.actor.use_kl_loss=true"


def test_explain_says_what_to_use():
    assert explain("rb/full").what_to_use[1].startswith("stale samples: never.")
    explanation = explain(f"verl:{VERL_FLAG},kl_loss_type=k1")
    assert [line.partition(".")[0] for line in explanation.what_to_use] == [
        "fresh samples: never",
        "stale samples: never",
    ]
    assert explanation.what_to_use[0] in str(explanation)


def test_explain_reads_flags():
    explanation = explain(f"verl:{VERL_FLAG}")
    assert explanation.terms == explanation.reading.terms
    assert [advice.goal.name for advice in explanation.advice] == ["sequence", "off_policy", "low_noise"]


def test_explain_reads_the_flags_of_a_script(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"python -m verl.trainer.main_ppo {VERL_FLAG}\n")
    assert explain(script).reading == explain(f"verl:{VERL_FLAG}").reading


def test_explain_reads_recipes():
    assert explain("grpo").reading is None
    assert "no KL" in str(explain("none"))


def test_explain_names_the_nearest_recipe():
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        explain("grpoo")


def test_explain_refuses_a_system_beside_a_recipe():
    with pytest.raises(UserError, match="is not one"):
        explain("grpo", system="verl")


WHERE = "tags.sweep = 'evidence_core' and optimizer.lr != 0.0001"
METRIC = "eval/heldout/reward"


def test_results_table_has_the_rows_of_the_command():
    rows = command(
        "results", "table", "--uri", str(EVIDENCE), "--where", WHERE, "--group", "kl.label", "--metric", METRIC
    )
    table = results_table(EVIDENCE, where=WHERE, group=["kl.label"], metrics=[METRIC])
    assert len(rows) > 5
    assert len(table) == len(rows)
    compared = ("kl.label", "metric", "n", "runs", "failed", "collapsed", "mean", "low", "high")
    for row, of_table in zip(rows, table.to_dict("records"), strict=True):
        assert {key: of_table[key] for key in compared} == {key: row[key] for key in compared}
    assert rows[0]["notes"] == "; ".join(table.attrs["notes"])


def test_results_table_separates_runs_by_what_they_differ_in():
    table = results_table(EVIDENCE, where=WHERE, group=["kl.label"], metrics=[METRIC])
    assert "optimizer.lr" in table
    assert "optimizer.lr" in "\n".join(table.attrs["notes"])


def test_results_table_refuses_an_unknown_status():
    with pytest.raises(UserError, match="status: got 'finishd'"):
        results_table(EVIDENCE, status=["finishd"])


@pytest.mark.parametrize("argument", ["group", "pool", "metrics"])
def test_results_table_refuses_an_unknown_key(argument):
    with pytest.raises(UserError, match=f"^{argument}: got 'kl.lable'"):
        results_table(EVIDENCE, where=WHERE, **{argument: ["kl.lable"]})


def test_results_table_pools_keys_by_a_pattern():
    where = "tags.sweep = 'evidence_core' and kl.label != 'no KL'"
    table = results_table(EVIDENCE, where=where, group=["kl.family"], pool=["optimizer.*", "kl*"])
    assert "optimizer.lr" not in table
    assert "some rows pool runs that differ in" in "\n".join(table.attrs["notes"])


ON_POLICY_TERMS = [
    (KLTerm("k2", placement="loss"), "token_reverse"),
    (KLTerm("k1", placement="reward", credit="total", baseline="after"), "sequence_reverse"),
]


def surrogate_of(term):
    """The surrogate of a term as a loss with the argument names that check_loss knows."""

    def loss(logp, ref_logp, behaviour_logp, mask):
        tensors = {"logp_BT": logp, "ref_logp_BT": ref_logp, "behaviour_logp_BT": behaviour_logp, "mask_BT": mask}
        return kl_surrogate(term, **tensors)

    return loss


@pytest.mark.parametrize(("term", "claim"), ON_POLICY_TERMS, ids=["loss", "reward"])
def test_check_loss_accepts_the_surrogate_of_a_term(term, claim):
    check_loss(surrogate_of(term), claims=claim, regimes=["on_policy"]).assert_ok()


@pytest.mark.parametrize("term", [term for term, _ in ON_POLICY_TERMS], ids=["loss", "reward"])
def test_a_completion_without_tokens_has_a_surrogate_of_0(term):
    logp = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [False, False]])
    value = surrogate_of(term)(logp, torch.full((2, 2), -3.0), logp.detach(), mask)
    value.sum().backward()
    assert value[1].tolist() == [0.0, 0.0]
    assert logp.grad[1].tolist() == [0.0, 0.0]
    assert value[0].abs().sum() > 0


def test_train_returns_the_last_values_of_a_run():
    class Run:
        path = Path("runs/a")

    class Outcome:
        run = Run()
        summary = {  # noqa: RUF012
            "name": "a",
            "seed": 0,
            "status": "FINISHED",
            "kl": "no KL",
            "run_id": None,
            "seconds": 1.0,
            "metrics": {"train/reward": 0.5},
            "evaluations": {"heldout": {"0": 0.1, "10": 0.3, "9": 0.2}},
        }

    row = api._row(Outcome())
    assert row["eval/heldout/reward"] == 0.3, "of update 10, which is not the last in the order of texts"
    assert row["train/reward"] == 0.5
    assert row["folder"] == "runs/a"
