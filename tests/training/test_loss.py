"""Every fast path of an update gives the gradients of the slow one, through the whole loss, for every KL placement.

Slow: one row at a time without padding, the whole ``[T, V]`` distribution of policy and reference, autograd. Fast: the
trainer's own pass, with a prompt shared or not, the update in micro-batches or whole, the head in chunks or whole, with
the backward written by hand. Both go through ``prepare`` and ``micro_loss`` on the same rows, so that baselines before,
after and of the term's own are part of what is compared.
"""

import contextlib
import dataclasses
import itertools
import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from kl_comedy.config import AlgorithmConfig
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.kl.estimators import TopTokens
from kl_comedy.kl.term import BASELINES, CREDITS
from kl_comedy.models.introspection import head_weights
from kl_comedy.models.reference import Reference
from kl_comedy.models.types import PassOptions, ReferencePass, TokenPass
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.registry import CORRECTIONS, ESTIMATORS
from kl_comedy.training.distributed import Ranks
from kl_comedy.training.loss import Preparation, micro_loss, named_terms, prepare
from kl_comedy.training.packing import Packer, model_inputs
from passes import head_columns, token_pass

V = 31
TEMPERATURE = 0.8
BETA = 0.7
ALONE = Ranks()
ALGORITHM = AlgorithmConfig(advantage="grpo", policy_loss="ppo_clip")

TERMS = {
    "no_kl": [],
    "k1_reward_to_go": [KLTerm("k1")],
    "k1_reward_total_before": [KLTerm("k1", credit="total", baseline="before")],
    "k1_reward_own": [KLTerm("k1", credit="own")],
    "k1_reward_exact_baseline": [KLTerm("k1", baseline="exact")],
    "k1_reward_discounted_anchored": [KLTerm("k1", discount=0.6, anchor="behaviour", input_clamp=0.5)],
    "k1_reward_prefix_own_baseline": [KLTerm("k1", correction="prefix", cap=1.5, baseline="own")],
    "k1_reward_sequence": [KLTerm("k1", level="sequence", correction="sequence")],
    "k3_reward_sampler": [KLTerm("k3", reference="sampler")],
    "k2_loss": [KLTerm("k2", placement="loss")],
    "k3_loss_token": [KLTerm("k3", placement="loss", correction="token")],
    "k3_loss_straight_through": [KLTerm("k3", placement="loss", gradient="k2", correction="token_detached")],
    "k3_loss_clamped": [KLTerm("k3", placement="loss", output_clamp=0.3)],
    "exact_loss": [KLTerm("exact", placement="loss")],
    "exact_loss_prefix": [KLTerm("exact", placement="loss", correction="prefix_previous")],
    "exact_forward_loss": [KLTerm("exact_forward", placement="loss")],
    "weights": [
        KLTerm("k1", baseline="own", weight="policy", weight_power=2.0),
        KLTerm("exact", placement="loss", weight="reference"),
        KLTerm("k1", credit="own", baseline="batch"),
    ],
    "exact_jsd": [
        KLTerm("exact_jsd", placement="loss"),
        KLTerm("exact_jsd", baseline="before", options={"share": 0.2}),
    ],
    "exact_reward_to_go_own_baseline": [KLTerm("exact", baseline="own")],
    "top_k": [
        KLTerm("top_k", placement="loss", options={"k": 3}),
        KLTerm("top_k", baseline="before", options={"k": 2, "tokens": "reference"}, correction="prefix_previous"),
    ],
    "exact_reward_before": [KLTerm("exact", baseline="before")],
    "reward_and_loss": [
        KLTerm("k1", baseline="before"),
        KLTerm("exact", placement="loss"),
        KLTerm("k3", placement="loss"),
    ],
}

MIXED = (
    "k1_reward_total_before",
    "k3_loss_token",
    "exact_forward_loss",
    "exact_reward_to_go_own_baseline",
    "reward_and_loss",
    "top_k",
    "exact_jsd",
    "weights",
)
"""Terms that together need every output of a pass, ahead of the update and in it."""


ENVIRONMENT = (1, -1, 2, 0, 1, 2, -1, 2, 1)
"""Which token an environment wrote, by the number of the row: where it is long enough, within it or at an end."""
UNLIMITED = 10**6
"""More tokens and elements than the update has: nothing is cut."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
    share: bool
    """Whether rows of a group share the pass over their prompt."""
    budget: int
    """Tokens per micro-batch."""
    chunk: int
    """Elements of the logits that the head computes at once."""


PATHS = {
    "shared_whole": Path(share=True, budget=UNLIMITED, chunk=UNLIMITED),
    "shared_packed": Path(share=True, budget=40, chunk=UNLIMITED),
    "shared_row_chunks": Path(share=True, budget=40, chunk=1),
    # Three whole rows of logits and a part of a fourth.
    "own_prompts_whole": Path(share=False, budget=UNLIMITED, chunk=3 * V + 5),
    "own_prompts_packed": Path(share=False, budget=25, chunk=UNLIMITED),
}
TRAINED = PATHS["shared_packed"]


def cases_of_paths():
    """Every term on the path that trains, the mixed ones on every path."""
    cases = []
    for path_name, path in PATHS.items():
        names = TERMS if path is TRAINED else [name for name in TERMS if name in MIXED]
        for name in names:
            cases.append((path_name, name))
    return cases


def gpt2(dtype=torch.float64):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(**sizes, **dropout, initializer_range=0.4)
    return GPT2LMHeadModel(config).to(dtype).eval()


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = LlamaConfig(**sizes, **heads, initializer_range=0.4)
    return LlamaForCausalLM(config).to(dtype).eval()


def pair(make, dtype, *, widened=False):
    """Policy and reference; ``widened``: the weights of ``dtype``, computed with in float32."""
    policy = moved(make(dtype))
    start = make(dtype)
    if widened:
        policy = policy.float()
        start = start.float()
    return policy, start


def moved(model):
    """The policy: a step away from what it started from, so that no KL and no ratio is trivial."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
            parameter.add_((0.05 * noise).to(parameter.dtype))
    return model


@cache
def rows():
    """Three prompts, groups of three, lengths from one to eight; log-probs of a sampler near the policy's.

    An environment wrote a part of some completions, here and there: a row of its own is without, at the first token,
    within and at the end. What stands in the place of its log-probs must not matter.
    """
    g = torch.Generator().manual_seed(2)
    policy = moved(gpt2())
    rows = []
    for group, size in enumerate((17, 5, 11)):
        prompt_ids = tuple(torch.randint(1, V, (size,), generator=g).tolist())
        prompt = Prompt(problem=Problem(id=str(group), text="", answer=""), text="", token_ids=prompt_ids)
        for length in torch.randint(1, 9, (3,), generator=g).tolist():
            ids = torch.randint(1, V, (length,), generator=g)
            logp_T, _ = dense_row(policy, prompt_ids, ids)
            logps = logp_T.detach() + 0.1 * torch.randn(length, generator=g, dtype=torch.float64)
            trained_T = torch.ones(length, dtype=torch.bool)
            if length > 2:
                trained_T = torch.arange(length) % length != ENVIRONMENT[len(rows)] % length
                logps = torch.where(trained_T, logps, -7.0)
            rollout = Rollout(
                prompt=prompt,
                group_id=group,
                completion_ids=tuple(ids.tolist()),
                stop_reason="eos",
                logps=tuple(logps.tolist()),
                versions=(0,) * length,
                text="",
                trained=tuple(trained_T.tolist()),
            )
            value = float(torch.randint(0, 4, (1,), generator=g)) / 3
            rows.append(Scored(rollout=rollout, reward=Reward(value=value)))
    return rows


def dense_row(model, prompt_ids, ids):
    """Log-probs of a completion alone, ``[T]``, and of every token at its prefixes, ``[T, V]``."""
    whole = torch.cat([torch.tensor(prompt_ids), ids])
    logits_TV = model(input_ids=whole[None]).logits[0, len(prompt_ids) - 1 : -1]
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    logp_TV = (logits_TV.to(wide) / TEMPERATURE).log_softmax(-1)
    return logp_TV.gather(1, ids[:, None])[:, 0], logp_TV


def dense(model, inputs):
    """Per row, what :func:`dense_row` gives for the trained tokens of a padded batch."""
    for n in range(len(inputs["ids_BT"])):
        prompt = inputs["prompt_ids_BP"][n][inputs["prompt_mask_BP"][n].bool()].tolist()
        real_T = inputs["real_BT"][n]
        logp_T, logp_TV = dense_row(model, prompt, inputs["ids_BT"][n][real_T])
        trained_T = inputs["mask_BT"][n][real_T]
        yield logp_T[trained_T], logp_TV[trained_T]


def spread(parts, mask_BT):
    """The values of each row in ``[B, T]``, zero where the mask is."""
    return torch.zeros(mask_BT.shape, dtype=parts[0].dtype).masked_scatter(mask_BT, torch.cat(parts))


def rows_of(values, mask_BT):
    """As :func:`spread`, for values that have dimensions of their own."""
    out = torch.zeros(*mask_BT.shape, *values.shape[1:], dtype=values.dtype)
    out[mask_BT] = values
    return out


class SlowReference:
    """The initial reference, row by row; it keeps nothing."""

    moving = False

    def __init__(self, model):
        self.model = model

    def forward_pass(self, **inputs):
        logp_BT = spread([logp_T for logp_T, _ in dense(self.model, inputs)], inputs["mask_BT"])
        return ReferencePass(logp_BT=logp_BT, hidden_NH=None, head=head_weights(self.model), temperature=TEMPERATURE)


def slow_pass(policy, reference):
    def run(inputs, _, terms):
        mask_BT = inputs["mask_BT"]
        # One tensor per row and column; they become [B, T] at the end.
        logp = []
        reverse_kl = []
        forward_kl = []
        certainties = {"policy": [], "reference": []}
        top_rows = {term.top: [] for term in terms if term.top is not None}
        mixtures = {term.mixture: [] for term in terms if term.mixture is not None}
        with torch.no_grad():
            reference_rows = [logq_TV for _, logq_TV in dense(reference, inputs)]
        for (logp_T, logp_TV), logq_TV in zip(dense(policy, inputs), reference_rows, strict=True):
            p_TV = logp_TV.exp()
            q_TV = logq_TV.exp()
            logp.append(logp_T)
            reverse_kl.append((p_TV * (logp_TV - logq_TV)).sum(-1))
            forward_kl.append((q_TV * (logq_TV - logp_TV)).sum(-1))
            for name, log_TV in (("policy", logp_TV), ("reference", logq_TV)):
                certainties[name].append(1 + (log_TV.exp() * log_TV).sum(-1).detach() / math.log(V))
            for share, column in mixtures.items():
                log_mixture_TV = (share * q_TV + (1 - share) * p_TV).log()
                reference_kl_T = (q_TV * (logq_TV - log_mixture_TV)).sum(-1)
                policy_kl_T = (p_TV * (logp_TV - log_mixture_TV)).sum(-1)
                column.append(share * reference_kl_T + (1 - share) * policy_kl_T)
            for k, tokens in top_rows:
                ranked_TV = logp_TV if tokens == "policy" else logq_TV
                ids_TK = ranked_TV.topk(k).indices
                logp_TK = logp_TV.gather(1, ids_TK)
                is_inside_T = (logp_TK == logp_T[:, None]).any(1)
                top_rows[k, tokens].append((logp_TK, logq_TV.gather(1, ids_TK), is_inside_T))
        top = {}
        for request, rows_of_request in top_rows.items():
            columns = [rows_of(torch.cat(column), mask_BT) for column in zip(*rows_of_request, strict=True)]
            top[request] = TopTokens(*columns)
        return TokenPass(
            logp_BT=spread(logp, mask_BT),
            kl_BT=spread(reverse_kl, mask_BT),
            forward_kl_BT=spread(forward_kl, mask_BT),
            entropy_BT=None,
            total_variation_BT=None,
            hidden_NH=None,
            certainty_BT=spread(certainties["policy"], mask_BT),
            reference_certainty_BT=spread(certainties["reference"], mask_BT),
            mixture={share: spread(column, mask_BT) for share, column in mixtures.items()},
            top=top,
        )

    return run


def fast_pass(policy, path):
    def run(inputs, reference, terms):
        needs = {quantity for term in terms for quantity in term.reads}
        return token_pass(
            policy,
            **inputs,
            temperature=TEMPERATURE,
            chunk_elements=path.chunk,
            share_prompt=path.share,
            reference=reference,
            kl="exact_reverse" in needs,
            forward_kl="exact_forward" in needs,
            certainty=any(term.weight == "policy" for term in terms),
            reference_certainty=any(term.weight == "reference" for term in terms),
            mixtures=[term.mixture for term in terms if term.mixture is not None],
            top=[term.top for term in terms if term.top is not None],
        )

    return run


def learn(
    models, terms, path=None, *, autocast=False, spoil=None, beta=BETA, algorithm=ALGORITHM, teacher=None, ranks=ALONE
):
    """The update's loss and its gradient in one vector; ``path`` None is the slow one, which takes no ``teacher``.

    ``spoil`` may change each micro-batch before it is learned from.
    """
    policy, start = models
    if path is None:
        policy_pass = slow_pass(policy, start)
        references = {"initial": SlowReference(start)}
        budget = UNLIMITED
    else:
        policy_pass = fast_pass(policy, path)
        options = PassOptions(temperature=TEMPERATURE, chunk_elements=path.chunk, share_prompt=path.share)
        references = {"initial": Reference(start, options)}
        if teacher is not None:
            references["teacher"] = Reference(teacher, options)
        budget = path.budget
    packer = Packer(budget=budget, pad_id=0, device=torch.device("cpu"), ranks=ranks)
    named = named_terms(terms)
    plan = Preparation(terms=named, algorithm=algorithm, packer=packer)
    betas = dict.fromkeys(named, beta)
    total = 0.0
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        micros = prepare(rows(), plan, betas=betas, references=references, policy_pass=policy_pass)
        if path is TRAINED and ranks is ALONE:
            assert len(micros) > 1, "the update was cut"
        for micro in micros:
            if spoil is not None:
                micro = spoil(micro)
            inputs = model_inputs(micro.experience)
            passes = {name: policy_pass(inputs, other, terms) for name, other in micro.references.items()}
            loss = micro_loss(micro, passes, terms=named, betas=betas, algorithm=algorithm).loss
            loss.backward()
            total += float(loss.detach())
    gradient = torch.cat([p.grad.flatten().double() for p in policy.parameters() if p.grad is not None])
    return SimpleNamespace(loss=total, gradient=gradient, micros=micros)


@cache
def slow(make, dtype, name, autocast=False):
    return learn(pair(make, dtype), TERMS[name], autocast=autocast)


def distance(update, expected):
    """The norm of the difference of two gradients over the norm of the second."""
    return float((update.gradient - expected.gradient).norm() / expected.gradient.norm())


@pytest.mark.parametrize(("path", "name"), cases_of_paths())
def test_a_fast_path_gives_the_slow_gradient(path, name):
    """In float64, but for advantages and the sampler's log-probs, which are float32 on both sides."""
    fast = learn(pair(gpt2, torch.float64), TERMS[name], PATHS[path])
    expected = slow(gpt2, torch.float64, name)
    assert fast.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-8)
    assert distance(fast, expected) < 1e-6


@pytest.mark.parametrize("name", MIXED)
def test_the_trained_path_in_float32(name):
    fast = learn(pair(llama, torch.float32), TERMS[name], TRAINED)
    expected = slow(llama, torch.float32, name)
    assert fast.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
    assert distance(fast, expected) < 1e-4


@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("name", MIXED)
def test_the_trained_path_in_bfloat16_is_no_further_from_the_truth_than_the_slow_one(name, autocast):
    """bfloat16 weights, or float32 weights under autocast. The truth is the slow float32 gradient at equal weights."""
    dtype = torch.float32 if autocast else torch.bfloat16
    fast = learn(pair(llama, dtype), TERMS[name], TRAINED, autocast=autocast)
    truth = learn(pair(llama, dtype, widened=True), TERMS[name])
    slow_error = distance(slow(llama, dtype, name, autocast), truth)
    # Rounding differs from path to path: half as much again, and 1 % where the slow error is small by chance.
    assert 0.0 < distance(fast, truth) < 1.5 * slow_error + 0.01


KINDS = {
    "log_ratio": {"estimator": "k3"},
    "exact_reverse": {"estimator": "exact"},
    "exact_forward": {"estimator": "exact_forward"},
    "exact_mixture": {"estimator": "exact_jsd"},
    "top_k": {"estimator": "top_k", "options": {"k": 3}},
}
"""An estimator for each thing that an estimator reads (:attr:`KLTerm.needs`)."""


def terms_in_reward(kind, baseline):
    """Every credit and correction in reward that is possible with a baseline, and a discount and a token weight."""
    choices = []
    for credit, correction in itertools.product(CREDITS, CORRECTIONS.names()):
        fields = {"credit": credit, "correction": correction}
        if correction != "none":
            fields["cap"] = 1.1
        choices.append(fields)
    choices.append({"weight": "policy"})
    choices.append({"credit": "to_go", "discount": 0.7})

    terms = []
    for fields in choices:
        with contextlib.suppress(UserError):  # a combination that has no meaning
            terms.append(KLTerm(**KINDS[kind], baseline=baseline, **fields))
    return terms


def test_every_thing_that_an_estimator_reads_is_cut_into_micro_batches():
    assert set(KINDS) == {entry.facts.get("needs", "log_ratio") for entry in ESTIMATORS}


@pytest.mark.parametrize(
    ("kind", "baseline"), [case for case in itertools.product(KINDS, BASELINES) if terms_in_reward(*case)]
)
def test_the_micro_batches_add_up_to_the_update(kind, baseline):
    """Whatever their size; most rows are shorter than the longest of the update, and longest in their micro-batch."""
    terms = terms_in_reward(kind, baseline)
    whole = learn(pair(gpt2, torch.float64), terms, Path(share=False, budget=UNLIMITED, chunk=UNLIMITED))
    cut = learn(pair(gpt2, torch.float64), terms, Path(share=False, budget=25, chunk=UNLIMITED))
    assert cut.loss == pytest.approx(whole.loss, rel=1e-11, abs=1e-12)
    assert distance(cut, whole) < 1e-12


@dataclasses.dataclass(frozen=True)
class Apart(Ranks):
    """One of several ranks without the others: nothing is summed over them."""

    def sum(self, tensor):
        return tensor


@pytest.mark.parametrize("budget", [1, 40, 10**6])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_gradients_of_the_ranks_add_up_to_the_update_and_none_is_left_behind(size, budget):
    """Nine rows in nine, a few or one micro-batch: some ranks have less to do, and must not count a row twice."""
    terms = [KLTerm("k1"), KLTerm("exact", placement="loss")]
    path = Path(share=False, budget=budget, chunk=UNLIMITED)
    whole = learn(pair(gpt2, torch.float64), terms, path)
    updates = [learn(pair(gpt2, torch.float64), terms, path, ranks=Apart(rank=n, size=size)) for n in range(size)]
    assert len({len(update.micros) for update in updates}) == 1, "collectives stay in step"
    full_micros = []
    empty_micros = []
    for update in updates:
        for micro in update.micros:
            if micro.empty:
                empty_micros.append(micro)
            else:
                full_micros.append(micro)
    divides_evenly = len(whole.micros) % size == 0
    assert len(full_micros) == len(whole.micros)
    assert divides_evenly == (not empty_micros)
    for micro in empty_micros:
        assert not micro.experience.weight_B.any()
    assert sum(update.loss for update in updates) == pytest.approx(whole.loss, rel=1e-11)
    added = SimpleNamespace(gradient=sum(update.gradient for update in updates))
    assert distance(added, whole) < 1e-12


@pytest.mark.parametrize("name", MIXED)
def test_beta_enters_once(name):
    """With advantages linear in the reward, the update is linear in beta, which may be below 0 (G-OPD)."""
    linear = AlgorithmConfig(advantage="rloo", policy_loss="reinforce")

    def gradient(beta):
        return learn(pair(gpt2, torch.float64), TERMS[name], TRAINED, beta=beta, algorithm=linear).gradient

    without = gradient(beta=0.0)
    of_one = gradient(beta=1.0) - without
    assert float(of_one.norm()) > 1e-3
    assert torch.allclose(gradient(beta=0.5) - without, 0.5 * of_one, atol=1e-6)
    assert torch.allclose(gradient(beta=-0.5) - without, -0.5 * of_one, atol=1e-6)


@pytest.mark.parametrize("baseline", [baseline for baseline in BASELINES if baseline != "after"])
def test_a_baseline_reaches_the_gradient(baseline):
    """A baseline that is asked for and not computed leaves the gradient of a term without one."""
    with_baseline = learn(pair(gpt2, torch.float64), [KLTerm("k1", credit="own", baseline=baseline)], TRAINED)
    without = learn(pair(gpt2, torch.float64), [KLTerm("k1", credit="own", baseline="after")], TRAINED)
    assert distance(with_baseline, without) > 1e-3


@pytest.mark.parametrize("baseline", ["after", "before", "own", "batch"])
def test_a_term_is_against_its_own_reference(baseline):
    """To the teacher beside the initial policy as where the teacher is the initial policy."""
    policy, start = pair(gpt2, torch.float64)
    teacher = moved(moved(gpt2()))
    fields = {"baseline": baseline}
    if baseline == "batch":
        fields["credit"] = "own"  # the only credit that a batch baseline has
    to_teacher = KLTerm("k1", reference="teacher", **fields)
    to_initial = KLTerm("k1", **fields)
    beside = learn((policy, start), [to_teacher], TRAINED, teacher=teacher)
    teacher_is_initial = learn((moved(gpt2()), teacher), [to_initial], TRAINED)
    start_is_initial = learn((moved(gpt2()), start), [to_initial], TRAINED)
    assert distance(beside, teacher_is_initial) < 1e-9
    assert distance(beside, start_is_initial) > 1e-2


def garbage(micro):
    """The same micro-batch with everything that no mask covers replaced by what would show: wrong tokens and NaN."""
    experience = micro.experience
    padding_BT = ~experience.real_BT
    outside_BT = ~experience.mask_BT
    before_BP = ~experience.prompt_mask_BP.bool()

    def nan(values_BT):
        return values_BT.masked_fill(outside_BT, float("nan"))

    references = {
        name: dataclasses.replace(reference, logp_BT=nan(reference.logp_BT))
        for name, reference in micro.references.items()
    }
    return dataclasses.replace(
        micro,
        experience=dataclasses.replace(
            experience,
            ids_BT=experience.ids_BT.masked_fill(padding_BT, V - 1),
            prompt_ids_BP=experience.prompt_ids_BP.masked_fill(before_BP, V - 2),
            behaviour_logp_BT=nan(experience.behaviour_logp_BT),
            advantage_BT=nan(experience.advantage_BT),
            ref_logp_BT=nan(experience.ref_logp_BT),
            policy_version_BT=experience.policy_version_BT.masked_fill(outside_BT, 99),
        ),
        references=references,
        baselines={position: nan(baseline_BT) for position, baseline_BT in micro.baselines.items()},
    )


@pytest.mark.parametrize(("share", "name"), [*itertools.product([True], TERMS), *itertools.product([False], MIXED)])
def test_what_fills_the_padding_and_an_environments_places_changes_no_bit(share, name):
    path = dataclasses.replace(PATHS["shared_whole"], share=share)
    clean = learn(pair(gpt2, torch.float64), TERMS[name], path)
    spoiled = learn(pair(gpt2, torch.float64), TERMS[name], path, spoil=garbage)
    assert clean.loss == spoiled.loss
    assert torch.equal(clean.gradient, spoiled.gradient)


SAME = [{"k1_reward_own", "k2_loss"}, {"k3_loss_token", "k3_loss_straight_through"}]
"""Equal by identity: k1's own cost on the score is k2's gradient, and so is the ratio times k3's."""


def test_terms_have_gradients_of_their_own():
    """Or the comparisons above would compare the same thing."""
    updates = {name: slow(gpt2, torch.float64, name) for name in TERMS}
    for one, other in SAME:
        assert distance(updates[one], updates[other]) < 1e-9, (one, other)
    for one, other in itertools.permutations(TERMS, 2):
        if {one, other} not in SAME:
            assert distance(updates[one], updates[other]) > 1e-3, (one, other)


def test_a_term_with_beta_0_is_measured_and_cannot_make_nan():
    """Its reference gives a sampled token the probability 0: the estimate is infinite, the loss is not."""
    models = pair(gpt2, torch.float64)
    spoiled = []

    def no_probability(micro):
        logp_BT = micro.references["initial"].logp_BT.masked_fill(micro.experience.mask_BT, -torch.inf)
        reference = dataclasses.replace(micro.references["initial"], logp_BT=logp_BT)
        spoiled.append(dataclasses.replace(micro, references={"initial": reference}))
        return spoiled[-1]

    terms = [KLTerm("k3", baseline="own"), KLTerm("k1", baseline="before"), KLTerm("exact", placement="loss")]
    metric_only = learn(models, terms, TRAINED, spoil=no_probability, beta=0.0)
    assert torch.equal(metric_only.gradient, learn(pair(gpt2, torch.float64), [], TRAINED).gradient)
    passes = {"initial": slow_pass(*models)(model_inputs(spoiled[0].experience), None, terms)}
    named = named_terms(terms)
    result = micro_loss(spoiled[0], passes, terms=named, betas=dict.fromkeys(named, 0.0), algorithm=ALGORITHM)
    assert len(result.values) == 3
    assert result.values["kl_1"][spoiled[0].experience.mask_BT].isinf().all()
    assert torch.isfinite(result.values["kl_2"]).all()


def test_a_measured_column_costs_nothing_in_the_backward_pass(monkeypatch):
    """The reference's log-probs, which only the gradient of an exact KL needs, are computed once and not again."""
    from kl_comedy.models import head

    calls = []
    log_softmax = head.log_softmax

    def counted(*arguments):
        calls.append(1)
        return log_softmax(*arguments)

    monkeypatch.setattr(head, "log_softmax", counted)
    hidden_NH = torch.randn(6, 4, requires_grad=True)
    weight_VH = torch.randn(V, 4)
    other = (torch.randn(6, 4), (weight_VH, None))
    counts = {}
    for used in ("logp", "kl"):
        calls.clear()
        columns = head_columns(
            hidden_NH,
            (weight_VH, None),
            torch.arange(6),
            temperature=1.0,
            chunk_elements=2 * V,
            requested=("kl",),
            reference=other,
        )
        columns[used].sum().backward()
        counts[used] = len(calls)
    # Six rows are three chunks. Each computes policy and reference forward and the policy backward; the KL also the
    # reference backward.
    assert counts == {"logp": 9, "kl": 12}
