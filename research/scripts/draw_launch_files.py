"""Draw launch files of public repositories, in an order that a commit's hash fixes.

python research/scripts/draw_launch_files.py [--seed HASH] [--count 20] [--wanted 200]

The candidates stand in tests/peers/launch_file_candidates.txt: one line "# owner/name commit system|user" for each
repository, then the paths of its candidate files. A candidate is a file of the repository's newest commit whose
path looks like a launch of a training; at most 40 of one repository stand there, the ones with the lowest
sha256(repository + path). A file that another repository has with the same bytes stands there once.

The files are ranked by sha256(seed + repository + path). The drawn ones are the first of that order, with at most
``--cap`` files of one repository and at least ``--users`` (a share of ``--wanted``) of users' repositories. A file
that a person labelled "not a training" (tests/peers/drawn_launch_files.jsonl) is passed over: it counts neither among
the wanted ones nor toward its repository's cap. The script prints the next ``--count`` files that have no label.

The third draw (``--third``) ranks by another seed the candidates that the first two draws left without a label. Here
a file that is no training counts like any other. The first 60 files are in drawn_launch_files_3.jsonl: the reader was
mended on them. The 72 that follow (62 launches of trainings) are in drawn_launch_files_4.jsonl and test it.

So do the 56 files of drawn_launch_files_5.jsonl (``--new-users``), which the same seed draws from other
repositories (tests/peers/launch_file_candidates_2.txt), at most 3 of each. They are repositories of users that were
found by their names (grpo, rlvr, openrlhf, rlhf, -R1) or by a search for launch scripts, and of which a snapshot could
be had. In that list a candidate is a shell script, a config (YAML, TOML), a notebook or a Python script whose path has
a word of training (train, grpo, ppo, rloo, rlhf, sft, dpo, ...) and none of tests, evaluation, serving, data or setup.
A file whose bytes a repository of the first list has is left out, so that copies of the systems' examples are not
drawn again.

The files of drawn_launch_files_7.jsonl and _8.jsonl are of repositories in neither list nor an earlier draw: found by
name, or because they hold a file of a system at its own path, where a snapshot could be had. A candidate there is as
in the second list, of at most 60 kB, with a word of RL in its text, no copy of a system's own file, and at most 2 to 5
of one repository. Within a system they are ranked by sha256(seed + repository + path), the seed being e5064694. The
files in odd places are _7, on which the reader was mended; those in even places are _8, which test it.

A label is one line of JSON: ``repo``, ``path``, ``commit`` and ``sha256`` (of the file's bytes) say which file was
read, ``kind`` and ``system`` what it starts. For ``kind: rl``, ``kl`` says where the run has a KL term (none, loss,
reward, both, advantage) and ``anchor`` the policy to which it is taken (reference, sampler, old policy).
``estimators`` and ``betas`` give each term's form and coefficient, with ``from``: the file, the base config, the
called script, or the default of the system. ``correction`` names a weight that the system puts on the KL term, and
``unknown`` what the file alone cannot tell. To get a file again: clone the repository and check out the commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

LAB = Path(__file__).resolve().parents[2] / "tests" / "peers"
CANDIDATES = LAB / "launch_file_candidates.txt"
LABELS = LAB / "drawn_launch_files.jsonl"
PASSED_OVER = "not a training"
SEED = "fc59c164b871fcf8d9bde4088cafdd3a24097242"
"""The last commit before the candidates were listed: the seed of the labels that are stored."""
FRESH_LABELS = LAB / "drawn_launch_files_2.jsonl"
FRESH_SEED = "36e024a0bd20ca7d898bc11eaafebfce947a3a69"
"""The commit of the reader that was mended on the first draw: the seed of a fresh draw of 60 files without a label."""
FRESH_WANTED = 64
"""So many are drawn by that seed that 60 of them had no label."""
THIRD_SEED = "b8c1b4383fdebfaabdbab94723085788a6e4eeb1"
"""The last commit before the third draw, which is made among the files without a label in the first two."""
DEVELOPMENT_LABELS = LAB / "drawn_launch_files_3.jsonl"
DEVELOPMENT_COUNT = 60
"""So many files of the third draw are for mending the reader."""
TEST_LABELS = LAB / "drawn_launch_files_4.jsonl"
NEW_USERS_LABELS = LAB / "drawn_launch_files_5.jsonl"
TEST_COUNT = 72
"""So many files of the third draw behind those are for testing it."""
NEW_CANDIDATES = LAB / "launch_file_candidates_2.txt"
NEW_COUNT = 56
"""So many files of the repositories of the second list are for testing it too."""
NEW_CAP = 3
"""The most files of one of these repositories."""


class Candidate(NamedTuple):
    repo: str
    commit: str
    owner: str
    """"system" for a repository of a training system, "user" for a repository of its users."""
    path: str


def read_candidates(text: str) -> list[Candidate]:
    """The candidates of the list's text, in its order."""
    candidates = []
    repo = ""
    commit = ""
    owner = ""
    for line in text.splitlines():
        # A line on a repository stands before the paths of its files.
        if line.startswith("# "):
            repo, commit, owner = line.removeprefix("# ").split(" ")
        elif line:
            candidates.append(Candidate(repo, commit, owner, line))
    return candidates


def read_kinds(text: str) -> dict[tuple[str, str], str]:
    """The kind that each labelled file has, by repository and path."""
    kinds = {}
    for line in text.splitlines():
        label = json.loads(line)
        kinds[(label["repo"], label["path"])] = label["kind"]
    return kinds


def unlabelled_candidates() -> list[Candidate]:
    """The candidates without a label in the first two draws."""
    labelled = {**read_kinds(LABELS.read_text()), **read_kinds(FRESH_LABELS.read_text())}
    candidates = read_candidates(CANDIDATES.read_text())
    return [candidate for candidate in candidates if (candidate.repo, candidate.path) not in labelled]


def rank(candidate: Candidate, seed: str) -> str:
    """The text by which candidates are sorted: in an order that the seed fixes, and nobody chose."""
    return hashlib.sha256((seed + candidate.repo + candidate.path).encode()).hexdigest()


def draw(
    candidates: list[Candidate],
    kinds: dict[tuple[str, str], str],
    seed: str,
    *,
    wanted: int = 200,
    cap: int = 6,
    users: float = 0.4,
) -> list[Candidate]:
    """The first ``wanted`` candidates of the seed's order that the caps admit, without those passed over.

    ``cap``: the most files of one repository. ``users``: the least share of files from users' repositories.
    """
    most_of_systems = wanted - round(users * wanted)
    of_systems = 0
    per_repository: dict[str, int] = {}
    drawn: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda candidate: rank(candidate, seed)):
        if len(drawn) == wanted:
            break
        if kinds.get((candidate.repo, candidate.path)) == PASSED_OVER:
            continue
        # One repository with hundreds of launch files would be most of the sample.
        if per_repository.get(candidate.repo, 0) == cap:
            continue
        if candidate.owner == "system" and of_systems == most_of_systems:
            continue
        if candidate.owner == "system":
            of_systems += 1
        per_repository[candidate.repo] = per_repository.get(candidate.repo, 0) + 1
        drawn.append(candidate)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--third", action="store_true", help="the third draw, by its seed")
    parser.add_argument("--new-users", action="store_true", help="the draw from the second list, by the third's seed")
    parser.add_argument("--seed", help="the hash of a commit")
    parser.add_argument("--count", type=int, default=20, help="how many files without a label are printed")
    parser.add_argument("--wanted", type=int, default=200, help="how many launches of trainings are drawn in all")
    parser.add_argument("--cap", type=int, default=6, help="the most files of one repository")
    parser.add_argument("--users", type=float, default=0.4, help="the least share of users' repositories")
    options = parser.parse_args()
    if options.new_users:
        labelled_files = [NEW_USERS_LABELS]
        candidates = read_candidates(NEW_CANDIDATES.read_text())
    elif options.third:
        labelled_files = [DEVELOPMENT_LABELS, TEST_LABELS]
        candidates = unlabelled_candidates()
    else:
        labelled_files = [LABELS]
        candidates = read_candidates(CANDIDATES.read_text())
    is_first = not options.third and not options.new_users
    seed = options.seed or (SEED if is_first else THIRD_SEED)
    kinds: dict[tuple[str, str], str] = {}
    for labels in labelled_files:
        if labels.exists():
            kinds.update(read_kinds(labels.read_text()))
    passed_over = kinds if is_first else {}
    drawn = draw(candidates, passed_over, seed, wanted=options.wanted, cap=options.cap, users=options.users)
    unlabelled = [candidate for candidate in drawn if (candidate.repo, candidate.path) not in kinds]
    passed_over_count = sum(kind == PASSED_OVER for kind in passed_over.values())
    print(f"# {len(drawn) - len(unlabelled)} labelled, {passed_over_count} passed over, {len(unlabelled)} to do")
    for candidate in unlabelled[: options.count]:
        print(candidate.repo, candidate.commit, candidate.owner, candidate.path)


if __name__ == "__main__":
    main()
