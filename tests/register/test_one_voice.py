"""`explain` advises nothing that the register, a symptom page or docs/decision.md tells a reader to undo.

What an answer says to set is read off its lines, typed into the reader's own flags, and the result is looked at: by the
rows of the register (measured on released code), by the pages' tables, and by enumeration.
"""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kl_comedy.cli.first_answer import candidate_had, first_answer, recipe_answer, what_was_left_out
from kl_comedy.errors import UserError
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.kl.oracle.stored_certificates import certificates
from kl_comedy.kl.recipes import resolve_terms
from kl_comedy.peers.advice import advice
from kl_comedy.peers.freshness import freshness_of
from kl_comedy.peers.systems import SENTENCES, SYSTEMS, advise, flag_key, read, read_flags, resolve
from kl_comedy.registry import RECIPES

ROOT = Path(__file__).resolve().parents[2]
ROWS = {row["id"]: row for row in json.loads((ROOT / "results" / "register" / "register.json").read_text())}
SYMPTOMS = ROOT / "docs" / "symptoms"

# --- what the pages say, as flags -------------------------------------------------------------------------------------
SYSTEM_OF_TITLE = {system.title.casefold(): name for name, system in SYSTEMS.items()} | {"labs-molt": "molt"}
NOT_READ = {
    "compose-rl",
    "Search-R1",
    "Open-Reasoner-Zero",
    "lmm-r1",
    "rlhf-book",
    "VLM-R1",
    "polgrad",
    "EMA-PG (2602.04417)",
    "GRPO (2402.03300)",
    "DeepSeek-V3.2 (report)",
    "RAPO (2510.03865)",
}
"""Systems and papers of the register whose flags `explain` does not read."""
ALSO = {
    "trl-rloo": "trainer=rloo",
    "skyrl-reward-k3": "use_kl_loss=false",
    "areal-reward-k1": "ref=set",
    "slime-k3": "kl_loss_coef=0.01",
    "slime-unbiased-k2": "kl_loss_coef=0.01",
    "miles-low-var-kl": "kl_loss_coef=0.01",
    "roll-k3": "kl_loss_coef=0.01",
    "prime-rl-ref-kl": "algo=opd",
    "axolotl": "use_bias_correction_kl=false",
}
"""What a row says in words, or takes for granted: that its KL has a coefficient."""
FIXES_IN_CODE = {"roll-k3", "rlinf-fsdp"}
"""Rows whose fix has the form of a flag and is a change of the code."""
FIX_IN_WORDS = {"verl-gdpo": "use_kl_loss=true kl_loss_type=k3+"}
OF_THE_BATCH = {"tinker-discount-0"}
"""Rows whose fault is the size of the batch and no flag: its error falls as 1 / batch."""
NO_EFFECT = {
    "`beta` unset: 0": ["trl:beta=0"],
    "`use_kl_in_reward` with `gdpo`": ["verl:use_kl_in_reward=true,adv_estimator=gdpo"],
    "k1 in the loss": [
        "verl:use_kl_loss=true,kl_loss_type=k1",
        "slime:use_kl_loss=true,kl_loss_coef=0.01,kl_loss_type=k1",
        "tunix:beta=0.04,kl_loss_mode=kl",
    ],
    "`--use-kl-loss` alone: coefficient 0": ["slime:use_kl_loss=true,kl_loss_coef=0"],
    "`--kl-coef` with `grpo`, `gspo`, `cispo`": [
        "slime:kl_coef=0.01,advantage_estimator=grpo",
        "slime:kl_coef=0.01,advantage_estimator=gspo",
        "slime:kl_coef=0.01,advantage_estimator=cispo",
    ],
    "`use_kl_in_reward` with `grpo`, `gdpo`; it also switches the loss's KL off": [
        "nemo-rl:use_kl_in_reward=true,adv_estimator=grpo",
        "nemo-rl:use_kl_in_reward=true,adv_estimator=gdpo",
    ],
    "`kl_ctl` without a `ref` section: an entropy bonus": ["areal:kl_ctl=0.1,ref=none"],
    "`kl_tau` pulls to the sampler, not to a reference": [],
}
"""The column "does nothing" of that page. prime-rl's is its default, which no advice could name."""
SYNONYMS = {"low_var_kl": "k3", "mse": "k2", "kl": "k1", "mse_kl": "k2"}


def settings(system, text):
    """The flags in a text of the register: `key=value`, `--key value`, and `key > 0` as 0.01; words are left out."""
    text = re.sub(r"\s*=\s*", "=", text.replace("(", " ").replace(")", " ").replace(",", " "))
    text = re.sub(r"([\w.-]+) > 0", r"\1=0.01", text)
    text = re.sub(r"--([\w.-]+) (?!-)([\w+]+)", r"\1=\2", text)
    text = re.sub(r"--([\w.-]+)(?=\s|$)", r"\1=true", text)
    text = re.sub(r"([\w.]+): (true|false)", r"\1=\2", text)
    given = {}
    for key, value in re.findall(r"(?<!\S)([\w.-]+)=(\S+)", text):
        try:
            given |= resolve(SYSTEMS[system], [(flag_key(key), value.rstrip(";"))])
        except UserError:
            # As `loss_type=dapo` of ms-swift: an option that does not bear on the KL.
            continue
    return given


def known_rows():
    for name, row in ROWS.items():
        if row["system"] in NOT_READ:
            continue
        system = SYSTEM_OF_TITLE[row["system"].casefold()]
        given = settings(system, f"{row['flags']} {ALSO.get(name, '')}")
        yield name, system, given


REGISTER = {name: (system, given) for name, system, given in known_rows()}


def fix_of(name):
    """What a row tells its readers to set, beside what they have; empty where the code must change."""
    if name in FIXES_IN_CODE:
        return {}
    system, _ = REGISTER[name]
    if ROWS[name]["fix"].startswith("none needed"):
        return {}
    return settings(system, FIX_IN_WORDS.get(name, ROWS[name]["fix"]))


def symptom_rows(page):
    """The cells of the tables of a page's Fix, without their titles."""
    text = (SYMPTOMS / f"{page}.md").read_text().split("## Fix")[1]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if "|" in line]
    return [row for row in rows if row[0] != "framework" and not set(row[0]) <= set("- |")]


# --- faults -----------------------------------------------------------------------------------------------------------
def faults():
    """What readers are told to undo: (where it says so, system, flags)."""
    for name, (system, given) in REGISTER.items():
        row = ROWS[name]
        if row["fresh"]["target"] != row["intended"] and name not in OF_THE_BATCH:
            yield f"the register's {name}", system, given
    for cell, texts in NO_EFFECT.items():
        for text in texts:
            reading = read(text)
            yield f"does_nothing.md: {cell}", reading.system, reading.given


FAULTS = list(faults())


def is_fault(reading):
    """The first place that calls a config a fault: it has the settings there and the same KL. Else an empty text."""
    for where, system, faulty in FAULTS:
        if system != reading.system or not all(_same(reading.flags[name], value) for name, value in faulty.items()):
            continue
        if _form(read_flags(SYSTEMS[system], faulty)) == _form(reading):
            return where
    return ""


def _form(reading):
    if reading.terms is None:
        return reading.instead
    return [term.label() for term in _unbounded(reading.terms)]


def _same(value, other):
    both_on = isinstance(value, float) and isinstance(other, float) and value > 0 and other > 0
    return both_on or SYNONYMS.get(str(value), value) == SYNONYMS.get(str(other), other)


NEVER = {
    "K1 in the loss.": lambda term, samples: (
        (term.estimator, term.placement, term.correction, term.gradient) == ("k1", "loss", "none", "natural")
    ),
    "K3 in the reward alone.": lambda term, samples: (term.estimator, term.placement) == ("k3", "reward"),
    "A prefix or completion ratio on a sampled KL, on stale samples.": lambda term, samples: (
        samples == "stale" and term.needs == "log_ratio" and term.correction in ("prefix", "sequence")
    ),
    "The exact KL as a cost to go, without a ratio and without a baseline, on stale samples.": lambda term, samples: (
        samples == "stale" and (term.estimator, term.placement, term.correction) == ("exact", "reward", "none")
    ),
    "K1 in the reward as a cost of the whole completion before the baseline, on stale samples.": lambda term, samples: (
        samples == "stale" and (term.estimator, term.credit, term.baseline) == ("k1", "total", "before")
    ),
    "A KL cost before an advantage that divides by its group's standard deviation": lambda term, samples: False,
}
"""What docs/decision.md says never to use, as a reader would check it; by what advantages divide is in the notes."""
DECISION = (ROOT / "docs" / "decision.md").read_text()


def never(terms, samples):
    return [words for words, applies in NEVER.items() if any(applies(term, samples) for term in terms)]


def decision_rows():
    """(samples, what one has, the recipe or the word open, what its gradient is that of) of the page's first table."""
    table = DECISION.split("<!-- generated: first screen -->")[1].split("**Open:**")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if "|" in line]
    for samples, have, use, target, *_ in rows[2:]:
        recipe = re.search(r"`([^`]+)`", use)
        yield samples, have, recipe[1] if recipe else use.partition(":")[0], target


# --- what an answer says ----------------------------------------------------------------------------------------------
def answer_of(reading):
    """The lines of `explain --full` for fresh, stale and unknown samples, with each label's text in one piece."""
    items = []
    lines = []
    for regime in ("on_policy", "off_policy", None):
        freshness = replace(freshness_of(reading), regime=regime)
        lines += first_answer(reading, freshness)
        lines += what_was_left_out(reading, freshness, is_assumed=False)
    for line in lines:
        if re.match(r"(  )?\S", line):
            items.append(line.strip())
        else:
            items[-1] += " " + line.strip()
    return [" ".join(item.split()) for item in items]


def recommended(reading):
    """(what for, settings) of each `set` in an answer, as typed; ("have", {}) for "you have this"."""
    pairs = []
    for item in answer_of(reading):
        for goal, typed in re.findall(
            r"for (the reverse KL of completions|that of each visited prefix) set ?(.*?)(?= for that|$)", item
        ):
            pairs.append((goal, typed))
        for words, candidate in CANDIDATES.items():
            # In the table of all, and as the nearest of them; flags hold no space.
            for start in (f"{words} set ", f"The nearest {words}: set "):
                if item.startswith(start):
                    typed = item.removeprefix(start).removesuffix(candidate.in_short).strip()
                    pairs.append((words, typed))
    return pairs


CANDIDATES = {candidate.words: candidate for candidate in advice().candidates.values()}
TARGETS = {
    "the reverse KL of completions": "sequence_reverse",
    "that of each visited prefix": "token_reverse",
}


def faults_of_answer(system, given):
    """Everything that an answer recommends against the pages, or that does not do what it is recommended for."""
    reading = read_flags(SYSTEMS[system], given)
    wrong = []
    for purpose, typed in recommended(reading):
        says = f"{reading.text}: for {purpose} set {typed!r}"
        if not typed:
            wrong.append(f"{says}: nothing to set")
            continue
        try:
            changes = read(f"{system}:{typed.replace(' ', ',')}").given
            result = read_flags(SYSTEMS[system], {**reading.given, **changes})
        except UserError as error:
            wrong.append(f"{says}: {error}")
            continue
        wrong += [f"{says}: {fault}" for fault in _faults_of_result(purpose, result)]
    return wrong


def _faults_of_result(purpose, result):
    if not result.terms:
        yield "no KL acts"
        return
    if SENTENCES["both"] in result.notes or len(result.terms) > 1:
        yield f"the KL is counted {len(result.terms)} times"
    samples = "fresh" if purpose in TARGETS else "stale"
    if SENTENCES["group_std"] in result.notes:
        yield "decision.md says never: a KL cost before an advantage that divides by its group's standard deviation"
    for words in never(result.terms, samples):
        yield f"decision.md says never: {words}"
    fault = is_fault(result)
    # The register and its letters say that the form on stale samples is open, and name it as one of the choices.
    if fault and samples == "fresh":
        yield f"it is a fault by {fault}"
    if purpose in TARGETS and not follows(result.terms, TARGETS[purpose]):
        yield f"it does not follow {TARGETS[purpose]}"
    if purpose in CANDIDATES and not is_form(result.terms, CANDIDATES[purpose]):
        yield "it is another form"


TREE = Tree.build(vocabulary=3, length=3)


def _unbounded(terms):
    return tuple(
        replace(term, beta=1.0, input_clamp=None, output_clamp=None, cap=None, cap_mode="truncate") for term in terms
    )


@functools.cache
def gradient(terms, regime):
    """By enumeration."""
    return expected_gradient(Instance.random(TREE, InstanceSettings(regime=regime, seed=1)), terms)


def follows(terms, target):
    """By enumeration, on samples of the policy itself."""
    instance = Instance.random(TREE, InstanceSettings(regime="on_policy", seed=1))
    return gradient(_unbounded(terms), "on_policy").relative_bias(target_gradient(instance, target)) < 1e-9


def is_form(terms, candidate):
    """By enumeration, on stale samples: the gradient of the recipe that decision.md names."""
    if candidate.terms[0].placement == "reward":
        (term,) = terms
        return (term.estimator, term.placement, term.credit, term.baseline) == ("k1", "reward", "to_go", "before")
    recipe = gradient(_unbounded(candidate.terms), "off_policy").gradient_D
    return gradient(_unbounded(terms), "off_policy").relative_bias(recipe) < 1e-9


# --- docs/decision.md -------------------------------------------------------------------------------------------------
def test_each_never_of_the_page_is_looked_for_here():
    bold = re.findall(r"^- \*\*(.*?)\*\*", DECISION.split("**Open:**")[0] + DECISION.split("Never:")[1], re.MULTILINE)
    assert bold == list(NEVER)


def test_the_choices_on_stale_samples_are_those_of_the_page():
    open_part = DECISION.split("**Open:**")[1].split("Never:")[0]
    of_page = [
        (words.lower(), kl) for words, kl in re.findall(r"^- \*\*(.*?)\*\* \(`(.*?)`\)", open_part, re.MULTILINE)
    ]
    assert [words for words, _ in of_page] == list(CANDIDATES)
    for words, kl in of_page:
        terms = resolve_terms(yaml.safe_load(kl))
        assert [term.label() for term in terms] == [term.label() for term in CANDIDATES[words].terms]
    for name, (system, given) in STARTS.items():
        listed = [item for item in answer_of(read_flags(SYSTEMS[system], given)) if item.startswith(tuple(CANDIDATES))]
        # Twice: behind the answer for stale samples, and behind that for samples of an unknown age.
        if listed:
            in_order = [*CANDIDATES, *CANDIDATES]
            assert [item.startswith(words) for item, words in zip(listed, in_order, strict=True)] == [True] * 8, name


def test_on_fresh_samples_the_page_and_the_answers_name_one_divergence():
    rows = {(samples, have): (recipe, target) for samples, have, recipe, target in decision_rows()}
    recipe, target = rows["fresh", "log-probs of sampled tokens"]
    assert rows["stale", "log-probs of sampled tokens"][0] == "open"
    assert follows(resolve_terms(recipe), TARGETS[target])
    said = set()
    for system, given in STARTS.values():
        for item in answer_of(read_flags(SYSTEMS[system], given)):
            said |= set(re.findall(r"^To change for (the .*? KL of \w+)", item))
            said |= set(re.findall(r"^You have this our advice on fresh samples is (.*)", item))
    assert said == {target}


@pytest.mark.parametrize("name", RECIPES.names())
def test_a_recipe_is_advised_what_the_page_has_for_its_samples(name):
    terms = RECIPES.get(name).fn()
    if not terms:
        return
    text = " ".join(" ".join(recipe_answer(terms, certificates(name, terms))).split())
    on_page = {(samples, recipe) for samples, _, recipe, _ in decision_rows()}
    for samples, recipe in re.findall(r"(Fresh|Stale) samples we advise .*? \(([\w/]+)\)", text):
        assert (samples.lower(), recipe) in on_page
        assert never(resolve_terms(recipe), samples.lower()) == []


# --- tests ------------------------------------------------------------------------------------------------------------
def starts():
    """Every config about which a page speaks: as it is, and after what the page says to set."""
    for name, (system, given) in REGISTER.items():
        yield name, system, given
        if fix_of(name):
            yield f"{name}-fixed", system, {**given, **fix_of(name)}
    for texts in NO_EFFECT.values():
        for text in texts:
            yield text, read(text).system, read(text).given
    for system in SYSTEMS:
        yield f"{system}-defaults", system, {}
    for candidate in advice().candidates.values():
        for system, flags in candidate.flags.items():
            yield f"{system}-{candidate.name}", system, flags
    for system in SYSTEMS.values():
        for item in advise(system):
            if item.flags is not None:
                yield f"{system.name}-{item.goal.name}", system.name, read(item.flags).given


STARTS = {name: (system, given) for name, system, given in starts()}


def test_every_row_of_a_system_that_explain_reads_says_its_flags():
    assert {row["system"] for row in ROWS.values()} - NOT_READ <= {
        row["system"] for row in ROWS.values() if row["system"].casefold() in SYSTEM_OF_TITLE
    }
    assert [name for name, (_, given) in REGISTER.items() if not given] == []


def test_every_line_of_the_page_on_what_does_nothing_is_a_fault_here():
    assert {row[1] for row in symptom_rows("does_nothing")} == set(NO_EFFECT)


@pytest.mark.parametrize("name", STARTS)
def test_an_answer_advises_nothing_that_a_page_tells_to_undo(name):
    system, given = STARTS[name]
    assert faults_of_answer(system, given) == []


@pytest.mark.parametrize(
    ("system", "goal", "planted", "start"),
    [
        ("verl", "low_noise", {"use_kl_loss": True, "kl_loss_type": "low_var_kl"}, "verl-k1"),
        ("openrlhf", "sequence", {"kl_estimator": "k1", "advantage_estimator": "rloo"}, "openrlhf-k3"),
        ("slime", "low_noise", {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k1"}, "slime-k3"),
    ],
    ids=["a fault of the register", "k1 stays in the loss", "k1 in the loss"],
)
def test_a_planted_contradiction_is_seen(monkeypatch, system, goal, planted, start):
    changed = replace(SYSTEMS[system], advice={**SYSTEMS[system].advice, goal: planted})
    monkeypatch.setitem(SYSTEMS, system, changed)
    assert faults_of_answer(*STARTS[start]) != []


@pytest.mark.parametrize("name", [name for name in REGISTER if fix_of(name)])
def test_what_a_row_tells_to_set_is_no_fault_and_follows_what_is_meant(name):
    system, given = REGISTER[name]
    result = read_flags(SYSTEMS[system], {**given, **fix_of(name)})
    assert never(result.terms, "fresh") == []
    assert is_fault(result) == ""
    # The KL that is meant is out of reach of GDPO's flags; the row says so, and names another that acts.
    intended = "token_reverse" if name in FIX_IN_WORDS else ROWS[name]["intended"]
    assert follows(result.terms, intended)


@pytest.mark.parametrize("name", STARTS)
def test_a_reader_is_told_that_he_has_a_form_where_its_gradient_is_his(name):
    """On stale samples, by enumeration; and one that he has not is never said to be his."""
    reading = read_flags(SYSTEMS[STARTS[name][0]], STARTS[name][1])
    if reading.terms and "off_policy" in reading.holds_in and len(reading.terms) == 1:
        of_term = [words for words, candidate in CANDIDATES.items() if is_form(reading.terms, candidate)]
        had = candidate_had(reading)
        assert of_term == ([had.words] if had else [])


def test_a_fault_of_the_batch_is_said_by_the_answer_too():
    for name in OF_THE_BATCH:
        system, given = REGISTER[name]
        assert "falls as 1 / batch" in ROWS[name]["fix"]
        assert any("falls as 1 / batch" in note for note in read_flags(SYSTEMS[system], given).notes)


def test_you_have_this_is_said_where_the_released_code_has_it():
    """On fresh samples, of rows by released code."""
    having = {
        name
        for name, (system, given) in REGISTER.items()
        if any(item.startswith("You have this") for item in answer_of(read_flags(SYSTEMS[system], given)))
    }
    measured = {name for name in REGISTER if ROWS[name]["fresh"]["target"] == "sequence_reverse"}
    assert having == measured
