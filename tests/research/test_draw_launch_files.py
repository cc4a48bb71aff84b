"""The draw of public launch files: the stored labels are of the files that the stored seed draws."""

import json

import pytest
from research.scripts.draw_launch_files import (
    CANDIDATES,
    DEVELOPMENT_COUNT,
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
    draw,
    read_candidates,
    read_kinds,
    unlabelled_candidates,
)


@pytest.fixture(scope="module")
def candidates():
    return read_candidates(CANDIDATES.read_text())


@pytest.fixture(scope="module")
def labels():
    return [json.loads(line) for line in LABELS.read_text().splitlines()]


@pytest.fixture(scope="module")
def final_labels():
    lines = [*TEST_LABELS.read_text().splitlines(), *NEW_USERS_LABELS.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_the_labelled_files_are_the_ones_that_the_seed_draws(candidates, labels):
    drawn = draw(candidates, read_kinds(LABELS.read_text()), SEED)
    labelled = {(label["repo"], label["path"], label["commit"]) for label in labels if label["kind"] != PASSED_OVER}
    assert {(candidate.repo, candidate.path, candidate.commit) for candidate in drawn} == labelled


def test_the_files_behind_them_and_those_of_new_users_test_the_reader(candidates, final_labels):
    behind = draw(unlabelled_candidates(), {}, THIRD_SEED)[DEVELOPMENT_COUNT : DEVELOPMENT_COUNT + TEST_COUNT]
    new_candidates = read_candidates(NEW_CANDIDATES.read_text())
    of_new_users = draw(new_candidates, {}, THIRD_SEED, wanted=NEW_COUNT, cap=NEW_CAP)
    labelled = [(label["repo"], label["path"], label["commit"]) for label in final_labels]
    assert [(file.repo, file.path, file.commit) for file in [*behind, *of_new_users]] == labelled
    assert not {candidate.repo for candidate in candidates} & {candidate.repo for candidate in new_candidates}
