"""Tables of samples: the numbers of their tokens are those that the metrics of the same update sum up."""

import pytest

from kl_comedy.tracking.tokens import STORED_ROWS
from training_runs import go, metrics_of, sample_tables_of

FEW = ["train.eval_every=0", "eval.at_start=false", "eval.at_end=false", "train.samples_every=1", "train.steps=3"]


def summed(rows, name):
    return sum(sum(row["per_token"][name]) for row in rows)


@pytest.fixture(scope="module")
def whole_batches(tmp_path_factory):
    """A run whose tables hold whole batches, of several micro-batches; two updates from each."""
    size = ["rollout.prompts_per_batch=4", "rollout.group_size=4", "algorithm.updates_per_batch=2"]
    options = ["algorithm.policy_loss=ppo_clip", "train.exact_kl_every=0", "train.microbatch_tokens=64"]
    return go(tmp_path_factory.mktemp("run"), *FEW, *size, *options).run


def test_sums_over_tokens_are_the_metrics_of_their_update(whole_batches):
    metrics = metrics_of(whole_batches)
    tables = sample_tables_of(whole_batches)
    assert sorted(tables) == [1, 2, 3]
    for step, rows in tables.items():
        assert len(rows) == STORED_ROWS
        tokens = sum(row["tokens"] for row in rows)
        k1 = summed(rows, "k1_reverse") / len(rows)
        assert k1 == pytest.approx(metrics[step, "kl/k1_reverse_sequence"], rel=1e-5, abs=1e-9)
        ratio = -summed(rows, "log_ratio") / tokens
        assert ratio == pytest.approx(metrics[step, "kl/k1_behaviour_token"], rel=1e-5, abs=1e-9)
        clipped = sum(row["per_token"]["use"].count("b") for row in rows)
        assert clipped / tokens <= metrics[step, "policy/clip_fraction"] + 1e-9
    assert abs(metrics[3, "kl/k1_reverse_sequence"]) > 1e-4, "or this shows nothing"
    assert abs(metrics[2, "kl/k1_behaviour_token"]) > 1e-6
    # The first and the last update measure the exact KL.
    assert tables[2][0]["per_token"]["exact_reverse"] is None
    exact = summed(tables[3], "exact_reverse") / STORED_ROWS
    assert exact == pytest.approx(metrics[3, "kl/exact_reverse_sequence"], rel=1e-5)


def test_pieces_of_tokens_are_the_completion(whole_batches):
    for rows in sample_tables_of(whole_batches).values():
        for row in rows:
            columns = row["per_token"]
            assert "".join(columns["text"]) == row["completion"]
            assert len(columns["text"]) == len(columns["use"]) == row["tokens"]
            assert len(columns["special"]) == (row["stop_reason"] == "eos")


def test_groups_are_those_of_the_batch(whole_batches):
    groups = [row["group"] for row in sample_tables_of(whole_batches)[1]]
    assert groups == sorted(groups)
    assert len(set(groups)) == 2


def test_completions_that_were_cut_are_marked_as_left_out(tmp_path):
    cut = ["rollout.max_new_tokens=4", "algorithm.mask_truncated=true", "train.steps=1"]
    (rows,) = sample_tables_of(go(tmp_path, *FEW, *cut).run).values()
    traced = rows[:STORED_ROWS]
    assert any(row["stop_reason"] == "length" for row in traced)
    for row in traced:
        was_cut = row["stop_reason"] == "length"
        assert (set(row["per_token"]["use"]) == {"o"}) == was_cut
    assert all("per_token" not in row for row in rows[STORED_ROWS:])
