"""Tokens that an environment wrote, within completions: whatever numbers stand there, and however many they are, the
update is that of the policy's own tokens.

The policy is a table: every token of its own has an id of its own, by which log-probs and exact KLs are looked up. So
a completion may be cut into turns in any way, and its numbers stay. ``test_loss`` has such tokens before a real model.
"""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kl_comedy
from drawn_objectives import K, algorithms, is_columnwise, terms
from kl_comedy.config import AlgorithmConfig
from kl_comedy.config.schema import ValueConfig
from kl_comedy.kl.estimators import TopTokens
from kl_comedy.models.types import ReferencePass, TokenPass
from kl_comedy.records import FOREIGN_VERSION, Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.asynchronous import Group
from kl_comedy.training.experience import TrainingPrompts
from kl_comedy.training.loss import Preparation, micro_loss, named_terms, prepare
from kl_comedy.training.old_policy import record_old_policy
from kl_comedy.training.packing import Packer, model_inputs

IDS = 64
"""Ids 1 to 63 are the policy's tokens, each once; 0 is written by the environment, and is the padding."""
TABLES = ("logp", "kl", "forward_kl", "mixture", "top")


def tables():
    """Log-probs and exact KLs of the policy by token id, as leaves; those of the reference and the sampler."""
    g = torch.Generator().manual_seed(5)

    def drawn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logp = -1.5 + 0.4 * drawn(IDS)
    leaves = {
        "logp": logp,
        "kl": drawn(IDS).square(),
        "forward_kl": drawn(IDS).square(),
        "mixture": drawn(IDS).square(),
        "top": (drawn(IDS, 2 * K)).log_softmax(-1)[:, :K].contiguous(),
    }
    for leaf in leaves.values():
        leaf.requires_grad_(True)
    constants = {
        "ref_logp": logp.detach() + 0.5 * drawn(IDS),
        "sampler": logp.detach() + 0.3 * drawn(IDS),
        "old_logp": logp.detach() + 0.2 * drawn(IDS),
        "old_value": drawn(IDS),
        "certainty": torch.rand(IDS, generator=g, dtype=torch.float64),
        "ref_top": drawn(IDS, 2 * K).log_softmax(-1)[:, :K].contiguous(),
    }
    return leaves, constants


class Table:
    """Policy and reference of :func:`tables`. ``junk``: what stands at tokens that are not the policy's.

    There it may ask for gradient, as the log-probs of a trainer that scores whole dialogues do.
    """

    moving = False

    def __init__(self, junk):
        self.leaves, self.constants = tables()
        self.junk = torch.tensor(junk, dtype=torch.float64, requires_grad=True)

    def at(self, values, inputs):
        is_own_BT = inputs["mask_BT"]
        looked_up = values[inputs["ids_BT"]]
        if looked_up.ndim == 3:
            is_own_BT = is_own_BT[..., None]
        return torch.where(is_own_BT, looked_up, self.junk)

    def forward_pass(self, **inputs):
        logp_BT = self.at(self.constants["ref_logp"], inputs)
        return ReferencePass(logp_BT=logp_BT, hidden_NH=None, head=None, temperature=1.0)

    def policy_pass(self, inputs, reference, terms):
        certainty_BT = self.at(self.constants["certainty"], inputs)
        top = {}
        for term in terms:
            if term.top is not None:
                logp_BTK = self.at(self.leaves["top"], inputs)
                ref_logp_BTK = self.at(self.constants["ref_top"], inputs)
                top[term.top] = TopTokens(logp_BTK, ref_logp_BTK, inputs["ids_BT"] % 2 == 1)
        return TokenPass(
            logp_BT=self.at(self.leaves["logp"], inputs),
            kl_BT=self.at(self.leaves["kl"], inputs),
            forward_kl_BT=self.at(self.leaves["forward_kl"], inputs),
            entropy_BT=None,
            total_variation_BT=None,
            hidden_NH=None,
            certainty_BT=certainty_BT,
            reference_certainty_BT=certainty_BT,
            mixture={term.mixture: self.at(self.leaves["mixture"], inputs) for term in terms if term.mixture},
            top=top,
        )


def rows_of(turns, constants, *, junk=0.0, version=FOREIGN_VERSION, same_prompt=True, explicit=False):
    """Groups of two completions. ``turns``: for each, how many tokens the environment writes before each of its own
    (and at its end). ``explicit``: say so of every token even where the environment wrote none."""
    rows = []
    next_id = 1
    for number, gaps in enumerate(turns):
        ids = []
        trained = []
        for gap in gaps[:-1]:
            ids += [0] * gap + [next_id]
            trained += [False] * gap + [True]
            next_id += 1
        ids += [0] * gaps[-1]
        trained += [False] * gaps[-1]
        logps = [float(constants["sampler"][id]) if own else junk for id, own in zip(ids, trained, strict=True)]
        group = number // 2
        prompt_ids = (1,) if same_prompt else (1, 2 + group)
        rollout = Rollout(
            prompt=Prompt(problem=Problem(id=str(group), text="", answer=""), text="", token_ids=prompt_ids),
            group_id=group,
            completion_ids=tuple(ids),
            logps=tuple(logps),
            versions=tuple(0 if own else version for own in trained),
            stop_reason="length" if number % 3 == 0 else "eos",
            text="",
            trained=tuple(trained) if explicit or not all(trained) else (),
        )
        rows.append(Scored(rollout=rollout, reward=Reward(value=(number * 7 % 5) / 4)))
    return rows


def old_policy_of(rows, constants, junk):
    recorded = []
    for row in rows:
        ids_T = torch.tensor(row.rollout.completion_ids)
        trained_T = torch.tensor(row.rollout.trained_mask)
        columns = {}
        for key in ("logp", "value"):
            values_T = constants[f"old_{key}"][ids_T].float()
            columns[key] = torch.where(trained_T, values_T, junk)
        recorded.append({**columns, "last": 0.25 if row.rollout.stop_reason == "length" else 0.0})
    return recorded


def update(turns, term, algorithm, *, junk=0.0, version=FOREIGN_VERSION, budget=12, same_prompt=True, explicit=False):
    """The loss of an update and its gradients by the tables, as one vector."""
    table = Table(junk)
    rows = rows_of(turns, table.constants, junk=junk, version=version, same_prompt=same_prompt, explicit=explicit)
    terms = named_terms([] if term is None else [term])
    betas = dict.fromkeys(terms, 0.7)
    packer = Packer(budget=budget, pad_id=0, device=torch.device("cpu"))
    plan = Preparation(terms=terms, algorithm=algorithm, packer=packer)
    micros = prepare(
        rows,
        plan,
        betas=betas,
        references={"initial": table},
        policy_pass=table.policy_pass,
        old_policy=old_policy_of(rows, table.constants, junk),
    )
    total = 0.0
    for micro in micros:
        passes = {"initial": table.policy_pass(model_inputs(micro.experience), None, list(terms.values()))}
        loss = micro_loss(micro, passes, terms=terms, betas=betas, algorithm=algorithm).loss
        if loss.requires_grad:
            loss.backward()
        total += float(loss.detach())
    junk_gradient = 0.0 if table.junk.grad is None else float(table.junk.grad)
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in table.leaves.values()]
    gradient = torch.cat([grad.flatten() for grad in grads])
    return SimpleNamespace(loss=total, gradient=gradient, junk_gradient=junk_gradient)


TURNS = st.lists(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=2, max_size=6), min_size=4, max_size=4)


@settings(max_examples=80)
@given(
    turns=TURNS,
    term=st.none() | terms(),
    algorithm=algorithms(),
    junk=st.sampled_from([float("nan"), float("inf"), -7.0, 3.0]),
    version=st.integers(-1, 9),
    budget=st.sampled_from([4, 12, 1000]),
    same_prompt=st.booleans(),
)
def test_no_number_at_a_token_of_the_environment_changes_a_bit(
    turns, term, algorithm, junk, version, budget, same_prompt
):
    rest = {"budget": budget, "same_prompt": same_prompt}
    clean = update(turns, term, algorithm, **rest)
    spoiled = update(turns, term, algorithm, junk=junk, version=version, **rest)
    assert clean.loss == spoiled.loss
    assert torch.equal(clean.gradient, spoiled.gradient)
    assert bool(torch.isfinite(clean.gradient).all())
    # A number that is not finite has no derivative to be multiplied by 0.
    if math.isfinite(junk):
        assert spoiled.junk_gradient == 0.0


@settings(max_examples=25)
@given(turns=TURNS, term=st.none() | terms(), algorithm=algorithms())
def test_a_rollout_without_them_is_the_same_to_the_bit_whether_it_says_so_or_not(turns, term, algorithm):
    whole = [[0] * len(gaps) for gaps in turns]
    silent = update(whole, term, algorithm)
    explicit = update(whole, term, algorithm, explicit=True)
    assert silent.loss == explicit.loss
    assert torch.equal(silent.gradient, explicit.gradient)


@settings(max_examples=100)
@given(turns=TURNS, term=st.none() | terms(), algorithm=algorithms())
def test_the_update_is_that_of_the_policys_tokens_side_by_side(turns, term, algorithm):
    """Without the environment's tokens, the same numbers: so a discount, a window, gae and a budget count the policy's.

    Left out are baselines that compare completions column by column.
    """
    assume(not is_columnwise(term, algorithm))
    with_environment = update(turns, term, algorithm, budget=1000)
    without = update([[0] * len(gaps) for gaps in turns], term, algorithm, budget=1000)
    assert with_environment.loss == pytest.approx(without.loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(with_environment.gradient, without.gradient, rtol=1e-5, atol=1e-6)


# --- where a rollout is read otherwise ------------------------------------------------------------------------------
def rollout_of(trained, versions=None):
    size = len(trained)
    return Rollout(
        prompt=Prompt(problem=Problem(id="a", text="", answer=""), text="", token_ids=(1, 2)),
        group_id=0,
        completion_ids=tuple(range(3, 3 + size)),
        logps=tuple(-1.0 if own else 0.0 for own in trained),
        versions=tuple(versions or (4 if own else FOREIGN_VERSION for own in trained)),
        stop_reason="length",
        text="",
        trained=tuple(trained),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trained": (True, False)}, "2 entries of trained for its 3 tokens"),
        ({"trained": (False,) * 3}, "3 tokens, all of the environment"),
    ],
    ids=["another length", "no token of the policy"],
)
def test_a_rollout_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(rollout_of((True, False, True)), **change)


def test_a_token_of_the_environment_is_no_old_sample():
    """Its version is below every version: a group of it would be dropped as too old."""
    scored = Scored(rollout=rollout_of((True, False, True), (5, FOREIGN_VERSION, 6)), reward=Reward(value=0.0))
    assert Group(0, 0, (scored,)).oldest == 5


def test_rows_in_a_checkpoint_keep_who_wrote_a_token():
    rollouts = [rollout_of((True, False, True)), dataclasses.replace(rollout_of((True, True)), trained=())]
    rows = [Scored(rollout=rollout, reward=Reward(value=1.0)) for rollout in rollouts]
    algorithm = SimpleNamespace(groups_without_signal="keep")
    config = SimpleNamespace(rollout=SimpleNamespace(prompts_per_batch=1), algorithm=algorithm, seed=0)
    prompts = TrainingPrompts(config, [rollouts[0].prompt], SimpleNamespace(size=1))
    assert prompts.unpack(prompts.pack(rows)) == rows


def test_the_value_after_the_end_is_after_the_last_token_whoever_wrote_it():
    """A pass whose hidden state at a token is the sum of the ids before it, as the value head reads it."""
    rows = [Scored(rollout=rollout_of(trained), reward=Reward(value=0.0)) for trained in ((True, False), (True,) * 3)]

    def policy_pass(inputs, reference, terms):
        before_BT = inputs["ids_BT"].cumsum(-1) - inputs["ids_BT"]
        hidden_NH = before_BT[inputs["mask_BT"]].double()[:, None]
        assert bool((inputs["mask_BT"] <= inputs["real_BT"]).all())
        return SimpleNamespace(logp_BT=torch.zeros(inputs["ids_BT"].shape), hidden_NH=hidden_NH)

    def value_head(hidden_NH, mask_BT):
        return torch.zeros(mask_BT.shape, dtype=torch.float64).masked_scatter(mask_BT, hidden_NH[:, 0])

    algorithm = AlgorithmConfig(advantage="gae", value=ValueConfig(bootstrap_truncated=True))
    packer = Packer(budget=100, pad_id=0, device=torch.device("cpu"))
    recorded = record_old_policy(
        rows, algorithm=algorithm, packer=packer, policy_pass=policy_pass, value_head=value_head
    )
    # Ids are 3, 4, 5: the value before each token of the policy, 0 at the environment's, and that after the end.
    assert [row["value"].tolist() for row in recorded] == [[0.0, 0.0], [0.0, 3.0, 7.0]]
    assert [row["last"] for row in recorded] == [7.0, 12.0]


def test_the_mask_is_all_that_kl_and_objective_know():
    """An estimator, a policy loss, DPO, an audit and a sharded model never learn who wrote a token."""
    package = Path(kl_comedy.__file__).parent
    files = [*(package / "kl").rglob("*.py"), *(package / "objective").rglob("*.py")]
    files += [package / "training" / "distributed.py", *package.rglob("audit/*.py")]
    assert len(files) > 30
    words = re.compile(r"\breal_BT\b|\.trained\b|\btrained_mask\b|\bRollout\b|\bdrawn_ids\b|\brestarts\b|ModelRows")
    knowing = [f"{file.name}: {word}" for file in files for word in words.findall(file.read_text())]
    assert knowing == []
