"""The draw of public launch files: what the caps admit, and that the stored labels are those of the stored seed."""

import json

import pytest
from research.scripts.draw_launch_files import (
    CANDIDATES,
    DEVELOPMENT_COUNT,
    DEVELOPMENT_LABELS,
    FRESH_LABELS,
    FRESH_SEED,
    FRESH_WANTED,
    LABELS,
    NEW_CANDIDATES,
    NEW_CAP,
    NEW_COUNT,
    NEW_USERS_LABELS,
    PASSED_OVER,
    SEED,
    TEST_COUNT,
    TEST_LABELS,
    THIRD_SEED,
    Candidate,
    draw,
    read_candidates,
    read_kinds,
    unlabelled_candidates,
)

KINDS = {"rl", "sft", "dpo", "reward model", "distillation", "other", PASSED_OVER}
PLACES = {"none", "loss", "reward", "both", "advantage"}
ORIGINS = {"file", "base config", "called script", "default", "unknown"}


@pytest.fixture(scope="module")
def candidates():
    return read_candidates(CANDIDATES.read_text())


@pytest.fixture(scope="module")
def labels():
    return [json.loads(line) for line in LABELS.read_text().splitlines()]


@pytest.fixture(scope="module")
def fresh_labels():
    return [json.loads(line) for line in FRESH_LABELS.read_text().splitlines()]


@pytest.fixture(scope="module")
def development_labels():
    return [json.loads(line) for line in DEVELOPMENT_LABELS.read_text().splitlines()]


@pytest.fixture(scope="module")
def final_labels():
    lines = [*TEST_LABELS.read_text().splitlines(), *NEW_USERS_LABELS.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def many(repo, owner, count):
    """``count`` candidates of one repository."""
    return [Candidate(repo, "0" * 40, owner, f"examples/run_{number}.sh") for number in range(count)]


def test_no_repository_has_more_files_than_the_cap():
    population = many("lab/system", "system", 500) + many("user/one", "user", 20) + many("user/two", "user", 20)
    repos = [candidate.repo for candidate in draw(population, {}, "seed", wanted=20, cap=8, users=0.5)]
    assert len(repos) == 20
    assert max(repos.count(repo) for repo in set(repos)) <= 8


def test_users_have_their_share_where_the_systems_have_more_candidates():
    population = many("user/one", "user", 50)
    for number in range(50):
        population += many(f"lab/system{number}", "system", 50)
    drawn = draw(population, {}, "seed", wanted=20, cap=10, users=0.5)
    assert len(drawn) == 20
    assert sum(candidate.owner == "user" for candidate in drawn) >= 10


def test_a_file_that_is_passed_over_is_replaced_by_the_next_of_the_order():
    population = many("user/one", "user", 10)
    first = draw(population, {}, "seed", wanted=3)
    kinds = {(first[0].repo, first[0].path): PASSED_OVER}
    second = draw(population, kinds, "seed", wanted=3)
    assert second[:2] == first[1:]
    assert second[2] not in first


def test_another_seed_draws_other_files():
    population = many("user/one", "user", 50)
    assert draw(population, {}, "seed", wanted=5) != draw(population, {}, "another", wanted=5)


def test_the_labelled_files_are_the_ones_that_the_seed_draws(candidates, labels):
    drawn = draw(candidates, read_kinds(LABELS.read_text()), SEED)
    labelled = {(label["repo"], label["path"], label["commit"]) for label in labels if label["kind"] != PASSED_OVER}
    assert {(candidate.repo, candidate.path, candidate.commit) for candidate in drawn} == labelled


def test_the_fresh_files_are_those_of_their_seed_that_had_no_label(candidates, fresh_labels):
    kinds = read_kinds(LABELS.read_text())
    drawn = draw(candidates, kinds, FRESH_SEED, wanted=FRESH_WANTED)
    without_label = [(file.repo, file.path, file.commit) for file in drawn if (file.repo, file.path) not in kinds]
    assert [(label["repo"], label["path"], label["commit"]) for label in fresh_labels] == without_label


def test_the_third_draw_starts_with_the_files_for_mending_the_reader(development_labels):
    drawn = draw(unlabelled_candidates(), {}, THIRD_SEED)[:DEVELOPMENT_COUNT]
    labelled = [(label["repo"], label["path"], label["commit"]) for label in development_labels]
    assert [(file.repo, file.path, file.commit) for file in drawn] == labelled


def test_the_files_behind_them_and_those_of_new_users_test_the_reader(candidates, final_labels):
    behind = draw(unlabelled_candidates(), {}, THIRD_SEED)[DEVELOPMENT_COUNT : DEVELOPMENT_COUNT + TEST_COUNT]
    new_candidates = read_candidates(NEW_CANDIDATES.read_text())
    of_new_users = draw(new_candidates, {}, THIRD_SEED, wanted=NEW_COUNT, cap=NEW_CAP)
    labelled = [(label["repo"], label["path"], label["commit"]) for label in final_labels]
    assert [(file.repo, file.path, file.commit) for file in [*behind, *of_new_users]] == labelled
    assert not {candidate.repo for candidate in candidates} & {candidate.repo for candidate in new_candidates}


def test_the_labels_use_the_words_that_the_script_explains(labels, fresh_labels, development_labels, final_labels):
    for label in [*labels, *fresh_labels, *development_labels, *final_labels]:
        assert label["kind"] in KINDS, label
        if label["kind"] != "rl":
            assert "kl" not in label, label
            continue
        assert label["kl"] in PLACES, label
        betas = label.get("betas", [])
        assert {term["from"] for term in betas + label.get("estimators", [])} <= ORIGINS, label
        if label["kl"] == "none":
            assert all(beta["value"] == 0 for beta in betas), label
        else:
            assert all(beta["value"] > 0 for beta in betas), label
            assert {beta["placement"] for beta in betas} == {label["kl"]}, label
