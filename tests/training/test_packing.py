"""Micro-batches by a budget of padded tokens: every row once, none over the budget that could be smaller."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.training.packing import by_token_budget

LENGTHS = st.integers(1, 9)
PROMPTS = st.lists(st.tuples(LENGTHS, st.lists(LENGTHS, min_size=1, max_size=4)), min_size=1, max_size=6)


def rows_of(prompts, context=()):
    """Rows of ``(tokens of the prompt, tokens of each completion)``; the n-th prompt is of the token n.

    With a ``context`` the last token of each completion of several tokens is read behind that.
    """
    rows = []
    for n, (size, lengths) in enumerate(prompts):
        prompt = SimpleNamespace(token_ids=(n,) * size)
        for length in lengths:
            restarts = ((length - 1, context),) if context and length > 1 else ()
            rollout = SimpleNamespace(prompt=prompt, completion_ids=(1,) * length, restarts=restarts)
            rows.append(SimpleNamespace(rollout=rollout))
    return rows


@given(PROMPTS, st.integers(1, 60), st.sampled_from([(), (7, 7, 7)]))
def test_every_row_is_in_one_micro_batch_within_the_budget(prompts, budget, context):
    rows = rows_of(prompts, context)
    batches = by_token_budget(rows, budget)
    positions = []
    for batch in batches:
        positions += batch
    assert sorted(positions) == list(range(len(rows)))
    for batch in batches:
        # The completions of a prompt share its pass, so a padded row is a prompt with all its completions.
        tokens_of_prompts = {}
        for position in batch:
            rollout = rows[position].rollout
            tokens_of_prompts.setdefault(rollout.prompt.token_ids, len(rollout.prompt.token_ids))
            tokens_of_prompts[rollout.prompt.token_ids] += len(rollout.completion_ids)
            tokens_of_prompts[rollout.prompt.token_ids] += len(context) if rollout.restarts else 0
        padded = max(tokens_of_prompts.values()) * len(tokens_of_prompts)
        if len(batch) > 1:
            assert padded <= budget, "only a row that is over the budget by itself may exceed it"
