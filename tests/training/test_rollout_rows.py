"""Rollouts with several rows: a dialogue that is read row by row has the update of the whole.

A real model in float64 reads both, through the trainer's own packing, passes, preparation and loss. Where every row's
context is what stands before it, no number may change, for any term, algorithm, cut and budget; a context of other
tokens is compared with passes over each row alone.
"""

import dataclasses
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from drawn_objectives import algorithms, is_columnwise, terms
from kl_comedy.config import AlgorithmConfig
from kl_comedy.config.schema import ValueConfig
from kl_comedy.kl import KLTerm
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.reference import Reference
from kl_comedy.models.types import PassOptions, Wanted
from kl_comedy.records import FOREIGN_VERSION, Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks
from kl_comedy.training.experience import TrainingPrompts
from kl_comedy.training.loss import Preparation, micro_loss, named_terms, prepare
from kl_comedy.training.metrics import row_metrics
from kl_comedy.training.old_policy import record_old_policy
from kl_comedy.training.packing import Packer, model_inputs, policy_inputs

V = 23
EXACT = 1e-12
PHASES = (Phase.explicit, Phase.generate)
"""Without shrinking: every example passes models, and the message says what was compared."""
OPTIONS = PassOptions(temperature=0.8, chunk_elements=10**6)


@cache
def models():
    """A policy in float64, one that it started from, and weights of a value head."""
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 64}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    start = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, initializer_range=0.4)).double().eval()
    policy = GPT2LMHeadModel(start.config).double().eval()
    policy.load_state_dict(start.state_dict())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy, start, torch.randn(8, dtype=torch.float64)


def policy_pass(inputs, reference, terms):
    needs = {quantity for term in terms for quantity in term.reads}
    wanted = Wanted(
        kl="exact_reverse" in needs,
        forward_kl="exact_forward" in needs,
        certainty=any(term.weight != "none" for term in terms),
        mixtures=tuple(term.mixture for term in terms if term.mixture is not None),
        top=tuple(term.top for term in terms if term.top is not None),
        hidden=True,
    )
    return token_pass(models()[0], OPTIONS, wanted, **inputs, reference=reference)


def value_head(hidden_NH, mask_BT):
    values_N = hidden_NH @ models()[2]
    return torch.zeros(mask_BT.shape, dtype=torch.float64).masked_scatter(mask_BT, values_N)


def dialogues(turns, seed=3):
    """Groups of two rollouts of one row. ``turns``: the lengths of the policy's turns and, between them, of replies."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for number, lengths in enumerate(turns):
        trained = []
        for turn, length in enumerate(lengths):
            trained += [turn % 2 == 0] * length
        size = len(trained)
        group = number // 2
        logps = -1.0 - torch.rand(size, generator=g, dtype=torch.float64)
        rollout = Rollout(
            prompt=Prompt(problem=Problem(id=str(group), text="", answer=""), text="", token_ids=(1 + group, 5, 2)),
            group_id=group,
            completion_ids=tuple(torch.randint(1, V, (size,), generator=g).tolist()),
            logps=tuple(logp if own else 0.0 for logp, own in zip(logps.tolist(), trained, strict=True)),
            versions=tuple(0 if own else FOREIGN_VERSION for own in trained),
            stop_reason="length" if number % 3 == 0 else "eos",
            text="",
            trained=tuple(trained),
        )
        rows.append(Scored(rollout=rollout, reward=Reward(value=(number * 7 % 5) / 4)))
    return rows


def cut(row, starts):
    """The same rollout in rows that begin at the tokens ``starts``; each reads all that stands before it."""
    rollout = row.rollout
    before = (*rollout.prompt.token_ids, *rollout.completion_ids)
    size = len(rollout.prompt.token_ids)
    inside = sorted({start for start in starts if 0 < start < len(rollout.completion_ids)})
    restarts = tuple((start, before[: size + start]) for start in inside)
    return dataclasses.replace(row, rollout=dataclasses.replace(rollout, restarts=restarts))


def row_per_turn(row):
    """A row for each turn of the policy: what the environment wrote stands in the contexts alone."""
    rollout = row.rollout
    ids = (*rollout.prompt.token_ids, *rollout.completion_ids)
    size = len(rollout.prompt.token_ids)
    drawn = [position for position, is_drawn in enumerate(rollout.trained) if is_drawn]
    restarts = tuple(
        (new, ids[: size + position]) for new, position in enumerate(drawn) if new > 0 and position - drawn[new - 1] > 1
    )
    columns = {
        name: tuple(getattr(rollout, name)[position] for position in drawn)
        for name in ("completion_ids", "logps", "versions", "trained")
    }
    return dataclasses.replace(row, rollout=dataclasses.replace(rollout, **columns, restarts=restarts))


class Apart(Ranks):
    """One of several ranks without the others: nothing is summed over them."""

    def sum(self, tensor):
        return tensor


def update(rows, term, algorithm, *, budget=10**6, ranks=SINGLE_PROCESS):
    """The loss of an update over ``rows`` and its gradient, as one vector."""
    policy, start, _ = models()
    packer = Packer(budget=budget, pad_id=0, device=torch.device("cpu"), ranks=ranks)
    terms = named_terms([] if term is None else [term])
    betas = dict.fromkeys(terms, 0.7)
    has_critic = algorithm.advantage == "gae"
    old_policy = record_old_policy(
        rows,
        algorithm=algorithm,
        packer=packer,
        policy_pass=policy_pass,
        value_head=value_head if has_critic else None,
    )
    micros = prepare(
        rows,
        Preparation(terms=terms, algorithm=algorithm, packer=packer),
        betas=betas,
        references={"initial": Reference(start, OPTIONS, copied=False)},
        policy_pass=policy_pass,
        old_policy=old_policy,
    )
    policy.zero_grad()
    total = 0.0
    for micro in micros:
        inputs = policy_inputs(micro.experience)
        passes = {"initial": policy_pass(inputs, micro.references["initial"], list(terms.values()))}
        loss = micro_loss(micro, passes, terms=terms, betas=betas, algorithm=algorithm).loss
        if loss.requires_grad:
            loss.backward()
        total += float(loss.detach())
    grads = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    gradient = torch.cat([grad.flatten() for grad in grads]) if grads else torch.zeros(1, dtype=torch.float64)
    return SimpleNamespace(loss=total, gradient=gradient, micros=micros)


def assert_equal(split, whole):
    assert split.loss == pytest.approx(whole.loss, rel=EXACT, abs=EXACT)
    scale = max(1.0, float(whole.gradient.abs().max()))
    torch.testing.assert_close(split.gradient, whole.gradient, rtol=0.0, atol=EXACT * scale)


TURNS = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=5).map(lambda turns: turns[: len(turns) - 1 + len(turns) % 2]),
    min_size=4,
    max_size=4,
)


@st.composite
def objectives(draw):
    algorithm = draw(algorithms())
    value = dataclasses.replace(algorithm.value, bootstrap_truncated=draw(st.booleans()))
    return draw(st.none() | terms()), dataclasses.replace(algorithm, value=value)


@settings(max_examples=120, phases=PHASES)
@given(
    turns=TURNS,
    starts=st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=4, max_size=4),
    objective=objectives(),
    budget=st.sampled_from([10, 30, 10**6]),
)
def test_a_rollout_that_is_cut_into_rows_has_the_update_of_the_whole(turns, starts, objective, budget):
    """Anywhere: between turns, within one, and within what the environment wrote."""
    rows = dialogues(turns)
    whole = update(rows, *objective)
    split = update([cut(row, at) for row, at in zip(rows, starts, strict=True)], *objective, budget=budget)
    assert_equal(split, whole)


@settings(max_examples=80, phases=PHASES)
@given(turns=TURNS, objective=objectives(), budget=st.sampled_from([10, 10**6]))
def test_a_dialogue_in_a_row_per_turn_has_the_update_of_the_whole(turns, objective, budget):
    """Left out are baselines that compare completions column by column: the columns are others."""
    assume(not is_columnwise(*objective))
    rows = dialogues(turns)
    whole = update(rows, *objective)
    split = update([row_per_turn(row) for row in rows], *objective, budget=budget)
    assert_equal(split, whole)


@pytest.mark.parametrize("budget", [10, 10**6], ids=["a rollout each", "one micro-batch"])
def test_the_gradients_of_the_ranks_add_up_to_the_update(budget):
    """A rollout's rows are on one rank; a rank that has none passes some without weight."""
    rows = [row_per_turn(row) for row in dialogues([[2, 1, 2], [1, 1, 3], [3, 1, 1], [2]])]
    algorithm = AlgorithmConfig(advantage="rloo")
    term = KLTerm("exact", placement="loss", correction="prefix_previous")
    whole = update(rows, term, algorithm)
    parts = [update(rows, term, algorithm, budget=budget, ranks=Apart(rank=rank, size=3)) for rank in range(3)]
    torch.testing.assert_close(sum(part.gradient for part in parts), whole.gradient, rtol=0, atol=EXACT)
    passed = [[micro.empty for micro in part.micros] for part in parts]
    assert len({len(micros) for micros in passed}) == 1
    assert any(any(micros) for micros in passed)


def test_rows_that_count_as_rollouts_have_another_update():
    """What the tests above compare does depend on what belongs to the rollout."""
    whole = dialogues([[2, 1, 2], [1, 1, 3], [3], [2]])
    as_rollouts = []
    for scored in map(row_per_turn, whole):
        for row in scored.rollout.rows:
            columns = {
                name: getattr(scored.rollout, name)[row.start : row.end]
                for name in ("completion_ids", "logps", "versions", "trained")
            }
            prompt = dataclasses.replace(scored.rollout.prompt, token_ids=row.context)
            rollout = dataclasses.replace(scored.rollout, **columns, prompt=prompt, restarts=())
            as_rollouts.append(dataclasses.replace(scored, rollout=rollout))
    algorithm = AlgorithmConfig(advantage="rloo", reduction="sequence_sum")
    rollouts = update(whole, KLTerm("k1"), algorithm).gradient
    rows = update(as_rollouts, KLTerm("k1"), algorithm).gradient
    assert float((rows - rollouts).norm()) > 0.1 * float(rollouts.norm())


def mixed():
    """One rollout of three rows: the second follows other tokens, as after compaction, and has a reply of a tool."""
    rollout = dialogues([[5, 2, 4], [4]])[0].rollout
    return dataclasses.replace(rollout, restarts=((3, (7, 7, 9)), (8, (1,))))


def alone(rollout, model):
    """Log-prob and exact KL of the trained tokens by a pass over each row alone, without padding, head and KL dense."""
    logps = []
    kls = []
    for row in rollout.rows:
        ids = torch.tensor([[*row.context, *rollout.completion_ids[row.start : row.end]]])
        size = len(row.context)
        logp_TV, ref_logp_TV = (
            (one(input_ids=ids).logits[0, size - 1 : -1] / OPTIONS.temperature).log_softmax(-1) for one in model[:2]
        )
        trained = torch.tensor(rollout.trained[row.start : row.end])
        logps.append(logp_TV.gather(1, ids[0, size:, None])[:, 0][trained])
        kls.append((logp_TV.exp() * (logp_TV - ref_logp_TV)).sum(-1)[trained])
    return torch.cat(logps), torch.cat(kls)


@pytest.mark.parametrize("share_prompt", [True, False])
def test_each_row_is_read_behind_its_own_context(share_prompt):
    """Beside a rollout of one row, and twice: two rollouts whose rows have equal contexts share their computation."""
    rollouts = [mixed(), dialogues([[5, 2, 4], [4]])[1].rollout, mixed()]
    rows = [Scored(rollout=rollout, reward=Reward(value=0.0)) for rollout in rollouts]
    (packed,) = Packer(budget=10**6, pad_id=0, device=torch.device("cpu")).micro_batches(rows)
    options = dataclasses.replace(OPTIONS, share_prompt=share_prompt)
    reference = Reference(models()[1], options, copied=False).forward_pass(**model_inputs(packed))
    passed = token_pass(models()[0], options, Wanted(kl=True), **model_inputs(packed), reference=reference)
    for index, position in enumerate(packed.positions):
        logp_N, kl_N = alone(rollouts[position], models())
        mask_T = packed.mask_BT[index]
        torch.testing.assert_close(passed.logp_BT[index][mask_T], logp_N, rtol=0, atol=EXACT)
        torch.testing.assert_close(passed.kl_BT[index][mask_T], kl_N, rtol=0, atol=EXACT)


def test_the_value_after_a_rollout_is_after_its_last_row():
    rollout = mixed()
    last = rollout.rows[-1]
    ids = torch.tensor([[*last.context, *rollout.completion_ids[last.start :]]])
    hidden_H = models()[0](input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
    (recorded,) = record_old_policy(
        [Scored(rollout=rollout, reward=Reward(value=0.0))],
        algorithm=AlgorithmConfig(advantage="gae", value=ValueConfig(bootstrap_truncated=True)),
        packer=Packer(budget=10**6, pad_id=0, device=torch.device("cpu")),
        policy_pass=policy_pass,
        value_head=value_head,
    )
    assert rollout.stop_reason == "length"
    assert recorded["last"] == pytest.approx(float((hidden_H @ models()[2]).detach()), abs=EXACT)


def test_rows_of_a_rollout_share_a_micro_batch_and_count_what_is_read():
    """A rollout is not split, whatever the budget; the contexts count as tokens."""
    rows = [Scored(rollout=mixed(), reward=Reward(value=0.0)), *dialogues([[5, 2, 4], [4], [4], [4]])[1:]]
    packer = Packer(budget=20, pad_id=0, device=torch.device("cpu"))
    packs = packer.micro_batches(rows)
    assert sorted(position for packed in packs for position in packed.positions) == [0, 1, 2, 3]
    (own,) = (packed for packed in packs if 0 in packed.positions)
    # 3 tokens of the prompt, 11 of the rollout and 4 of the contexts: no room for 4 more.
    assert list(own.positions) == [0]
    assert own.rows.ids_RT.shape == (3, 5)


def test_rows_with_other_tokens_than_the_rollout_are_refused():
    (packed,) = Packer(budget=100, pad_id=0, device=torch.device("cpu")).micro_batches(
        [Scored(rollout=mixed(), reward=Reward(value=0.0))]
    )
    turned = dataclasses.replace(packed.rows, **{name: value.flip(0) for name, value in vars_of(packed.rows).items()})
    with pytest.raises(ValueError, match="other trained tokens than ids_BT"):
        token_pass(models()[0], OPTIONS, **{**model_inputs(packed), "rows": turned})


def vars_of(record):
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


@pytest.mark.parametrize(
    ("restarts", "message"),
    [
        (((0, (1,)),), "one has no token"),
        (((11, (1,)),), "one has no token"),
        (((4, (1,)), (4, (1,))), "one has no token"),
        (((5, (1,)), (4, (1,))), "one has no token"),
        (((4, ()),), "without context"),
    ],
)
def test_rows_that_cannot_be_are_refused(restarts, message):
    with pytest.raises(ValueError, match=message) as caught:
        dataclasses.replace(mixed(), restarts=restarts)
    assert "\n" not in str(caught.value)


def test_rows_in_a_checkpoint_are_those_of_the_rollout():
    rollout = mixed()
    rows = [Scored(rollout=rollout, reward=Reward(value=1.0))]
    algorithm = SimpleNamespace(groups_without_signal="keep")
    config = SimpleNamespace(rollout=SimpleNamespace(prompts_per_batch=1), algorithm=algorithm, seed=0)
    prompts = TrainingPrompts(config, [rollout.prompt], SimpleNamespace(size=1))
    assert prompts.unpack(prompts.pack(rows)) == rows


def test_metrics_count_a_rollout_and_not_its_rows():
    whole = dialogues([[2, 1, 3], [2]])
    metrics = row_metrics(whole)
    split = row_metrics([row_per_turn(row) for row in whole])
    assert (metrics["train/rows"], split["train/rows"]) == (1.0, 1.5)
    for name in ("train/reward", "train/length", "train/turns", "train/truncated_share"):
        assert split[name] == metrics[name], name
