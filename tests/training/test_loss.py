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

V, TEMPERATURE, BETA = 31, 0.8, 0.7
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

MIXED = ("k1_reward_total_before", "k3_loss_token", "exact_forward_loss", "exact_reward_to_go_own_baseline")
MIXED += ("reward_and_loss", "top_k", "exact_jsd", "weights")
"""Terms that together need every output of a pass, ahead of the update and in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
    share: bool
    budget: int
    chunk: int


PATHS = {
    "shared_whole": Path(share=True, budget=10**6, chunk=10**6),
    "shared_packed": Path(share=True, budget=40, chunk=10**6),
    "shared_row_chunks": Path(share=True, budget=40, chunk=1),
    "own_prompts_whole": Path(share=False, budget=10**6, chunk=3 * V + 5),
    "own_prompts_packed": Path(share=False, budget=25, chunk=10**6),
}
TRAINED = PATHS["shared_packed"]

CASES = [(path, name) for path in PATHS for name in TERMS if PATHS[path] is TRAINED or name in MIXED]
"""Every term on the path that trains, the mixed ones on every path."""


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
    policy, start = moved(make(dtype)), make(dtype)
    return (policy.float(), start.float()) if widened else (policy, start)


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
    """Three prompts, groups of three, lengths from one to eight; log-probs of a sampler near the policy's."""
    g = torch.Generator().manual_seed(2)
    policy, rows = moved(gpt2()), []
    for group, size in enumerate((17, 5, 11)):
        prompt_ids = tuple(torch.randint(1, V, (size,), generator=g).tolist())
        prompt = Prompt(problem=Problem(id=str(group), text="", answer=""), text="", token_ids=prompt_ids)
        for length in torch.randint(1, 9, (3,), generator=g).tolist():
            ids = torch.randint(1, V, (length,), generator=g)
            logp_T, _ = dense_row(policy, prompt_ids, ids)
            logps = logp_T.detach() + 0.1 * torch.randn(length, generator=g, dtype=torch.float64)
            rollout = Rollout(
                prompt=prompt,
                group_id=group,
                completion_ids=tuple(ids.tolist()),
                stop_reason="eos",
                logps=tuple(logps.tolist()),
                versions=(0,) * length,
                text="",
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
    """Per row, what :func:`dense_row` gives for the real tokens of a padded batch."""
    for n in range(len(inputs["ids_BT"])):
        prompt = inputs["prompt_ids_BP"][n][inputs["prompt_mask_BP"][n].bool()].tolist()
        yield dense_row(model, prompt, inputs["ids_BT"][n][inputs["mask_BT"][n]])


def spread(parts, mask_BT):
    return torch.zeros(mask_BT.shape, dtype=parts[0].dtype).masked_scatter(mask_BT, torch.cat(parts))


def rows_of(values, mask_BT):
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
        logp, kl, forward, certainties = [], [], [], {"policy": [], "reference": []}
        tops = {term.top: [] for term in terms if term.top is not None}
        mixed = {term.mixture: [] for term in terms if term.mixture is not None}
        with torch.no_grad():
            others = [logq_TV for _, logq_TV in dense(reference, inputs)]
        for (logp_T, logp_TV), logq_TV in zip(dense(policy, inputs), others, strict=True):
            logp.append(logp_T)
            kl.append((logp_TV.exp() * (logp_TV - logq_TV)).sum(-1))
            forward.append((logq_TV.exp() * (logq_TV - logp_TV)).sum(-1))
            for name, log_TV in (("policy", logp_TV), ("reference", logq_TV)):
                certainties[name].append(1 + (log_TV.exp() * log_TV).sum(-1).detach() / math.log(V))
            for share, column in mixed.items():
                log_mixture_TV = (share * logq_TV.exp() + (1 - share) * logp_TV.exp()).log()
                from_ref_T = (logq_TV.exp() * (logq_TV - log_mixture_TV)).sum(-1)
                column.append(share * from_ref_T + (1 - share) * (logp_TV.exp() * (logp_TV - log_mixture_TV)).sum(-1))
            for k, tokens in tops:
                ids_TK = (logp_TV if tokens == "policy" else logq_TV).topk(k).indices
                inside_T = (logp_TV.gather(1, ids_TK) == logp_T[:, None]).any(1)
                tops[k, tokens].append((logp_TV.gather(1, ids_TK), logq_TV.gather(1, ids_TK), inside_T))
        logp_BT, kl_BT, forward_BT = (spread(parts, inputs["mask_BT"]) for parts in (logp, kl, forward))
        top = {
            request: TopTokens(*(rows_of(torch.cat(column), inputs["mask_BT"]) for column in zip(*rows, strict=True)))
            for request, rows in tops.items()
        }
        return TokenPass(
            logp_BT=logp_BT,
            kl_BT=kl_BT,
            forward_kl_BT=forward_BT,
            entropy_BT=None,
            total_variation_BT=None,
            hidden_NH=None,
            certainty_BT=spread(certainties["policy"], inputs["mask_BT"]),
            reference_certainty_BT=spread(certainties["reference"], inputs["mask_BT"]),
            mixture={share: spread(column, inputs["mask_BT"]) for share, column in mixed.items()},
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
    policy_pass, reference, budget = slow_pass(policy, start), SlowReference(start), 10**6
    if path is not None:
        options = PassOptions(temperature=TEMPERATURE, chunk_elements=path.chunk, share_prompt=path.share)
        policy_pass, reference, budget = fast_pass(policy, path), Reference(start, options), path.budget
    references = {"initial": reference} | ({} if teacher is None else {"teacher": Reference(teacher, options)})
    packer = Packer(budget=budget, pad_id=0, device=torch.device("cpu"), ranks=ranks)
    named = named_terms(terms)
    plan = Preparation(terms=named, algorithm=algorithm, packer=packer)
    betas, total = dict.fromkeys(named, beta), 0.0
    context = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        micros = prepare(rows(), plan, betas=betas, references=references, policy_pass=policy_pass)
        if path is TRAINED and ranks is ALONE:
            assert len(micros) > 1, "the update was cut"
        for micro in micros:
            micro = micro if spoil is None else spoil(micro)
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


def far(one, other):
    """The difference of two gradients over the norm of the second."""
    return float((one.gradient - other.gradient).norm() / other.gradient.norm())


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_fast_path_gives_the_slow_gradient(path, name):
    """In float64, but for advantages and the sampler's log-probs, which are float32 on both sides."""
    fast, own = learn(pair(gpt2, torch.float64), TERMS[name], PATHS[path]), slow(gpt2, torch.float64, name)
    assert fast.loss == pytest.approx(own.loss, rel=1e-6, abs=1e-8)
    assert far(fast, own) < 1e-6


@pytest.mark.parametrize("name", MIXED)
def test_the_trained_path_in_float32(name):
    fast, own = learn(pair(llama, torch.float32), TERMS[name], TRAINED), slow(llama, torch.float32, name)
    assert fast.loss == pytest.approx(own.loss, rel=1e-4, abs=1e-6)
    assert far(fast, own) < 1e-4


@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("name", MIXED)
def test_the_trained_path_in_bfloat16_is_no_further_from_the_truth_than_the_slow_one(name, autocast):
    """bfloat16 weights, or float32 weights under autocast. The truth is the slow float32 gradient at equal weights."""
    dtype = torch.float32 if autocast else torch.bfloat16
    fast = learn(pair(llama, dtype), TERMS[name], TRAINED, autocast=autocast)
    truth = learn(pair(llama, dtype, widened=True), TERMS[name])
    assert 0.0 < far(fast, truth) < 1.5 * far(slow(llama, dtype, name, autocast), truth) + 0.01


KINDS = {
    "log_ratio": {"estimator": "k3"},
    "exact_reverse": {"estimator": "exact"},
    "exact_forward": {"estimator": "exact_forward"},
    "exact_mixture": {"estimator": "exact_jsd"},
    "top_k": {"estimator": "top_k", "options": {"k": 3}},
}
"""An estimator for each thing that an estimator reads (:attr:`KLTerm.needs`)."""


def all_in_reward(kind, baseline):
    """Every credit and correction in reward that is possible with a baseline, and a discount and a token weight."""
    for credit, correction in itertools.product(CREDITS, CORRECTIONS.names()):
        bounds = {} if correction == "none" else {"cap": 1.1}
        with contextlib.suppress(UserError):
            yield KLTerm(**KINDS[kind], credit=credit, correction=correction, baseline=baseline, **bounds)
    for more in ({"weight": "policy"}, {"credit": "to_go", "discount": 0.7}):
        with contextlib.suppress(UserError):
            yield KLTerm(**KINDS[kind], baseline=baseline, **more)


def test_every_thing_that_an_estimator_reads_is_cut_into_micro_batches():
    assert set(KINDS) == {entry.facts.get("needs", "log_ratio") for entry in ESTIMATORS}


@pytest.mark.parametrize(
    ("kind", "baseline"),
    [each for each in itertools.product(KINDS, BASELINES) if next(all_in_reward(*each), None) is not None],
)
def test_the_micro_batches_add_up_to_the_update(kind, baseline):
    """Whatever their size; most rows are shorter than the longest of the update, and longest in their micro-batch."""
    terms = list(all_in_reward(kind, baseline))
    whole, cut = (
        learn(pair(gpt2, torch.float64), terms, Path(share=False, budget=budget, chunk=10**6)) for budget in (10**6, 25)
    )
    assert cut.loss == pytest.approx(whole.loss, rel=1e-11, abs=1e-12)
    assert far(cut, whole) < 1e-12


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
    path = Path(share=False, budget=budget, chunk=10**6)
    whole = learn(pair(gpt2, torch.float64), terms, path)
    apart = [learn(pair(gpt2, torch.float64), terms, path, ranks=Apart(rank=n, size=size)) for n in range(size)]
    assert len({len(one.micros) for one in apart}) == 1, "collectives stay in step"
    micros = [micro for one in apart for micro in one.micros]
    empty = [micro for micro in micros if micro.empty]
    assert len(micros) - len(empty) == len(whole.micros) and (len(whole.micros) % size == 0) == (not empty)
    assert all(not micro.experience.weight_B.any() for micro in empty)
    assert sum(one.loss for one in apart) == pytest.approx(whole.loss, rel=1e-11)
    added = SimpleNamespace(gradient=sum(one.gradient for one in apart))
    assert far(added, whole) < 1e-12


def test_beta_enters_once():
    """With advantages linear in the reward, the update is linear in beta, which may be below 0 (G-OPD)."""
    linear = AlgorithmConfig(advantage="rloo", policy_loss="reinforce")
    for name in MIXED:
        without, below, half, full = (
            learn(pair(gpt2, torch.float64), TERMS[name], TRAINED, beta=beta, algorithm=linear).gradient
            for beta in (0.0, -0.5, 0.5, 1.0)
        )
        assert float((full - without).norm()) > 1e-3
        assert torch.allclose(half - without, 0.5 * (full - without), atol=1e-6), name
        assert torch.allclose(below - without, -0.5 * (full - without), atol=1e-6), name


@pytest.mark.parametrize("baseline", [baseline for baseline in BASELINES if baseline != "after"])
def test_a_baseline_reaches_the_gradient(baseline):
    """A baseline that is asked for and not computed leaves the gradient of a term without one."""
    of_baseline, without = (
        learn(pair(gpt2, torch.float64), [KLTerm("k1", credit="own", baseline=name)], TRAINED)
        for name in (baseline, "after")
    )
    assert far(of_baseline, without) > 1e-3


@pytest.mark.parametrize("baseline", ["after", "before", "own", "batch"])
def test_a_term_is_against_its_own_reference(baseline):
    """To the teacher beside the initial policy as where the teacher is the initial policy."""
    policy, start = pair(gpt2, torch.float64)
    teacher = moved(moved(gpt2()))
    fields = {"baseline": baseline, **({"credit": "own"} if baseline == "batch" else {})}
    of_teacher, of_start = KLTerm("k1", reference="teacher", **fields), KLTerm("k1", **fields)
    beside = learn((policy, start), [of_teacher], TRAINED, teacher=teacher)
    alone, other = (learn((moved(gpt2()), model), [of_start], TRAINED) for model in (teacher, start))
    assert far(beside, alone) < 1e-9 and far(beside, other) > 1e-2


def garbage(micro):
    """The same micro-batch with everything that no mask covers replaced by what would show: wrong tokens and NaN."""
    experience = micro.experience
    outside_BT, before_BP = ~experience.mask_BT, ~experience.prompt_mask_BP.bool()

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
            ids_BT=experience.ids_BT.masked_fill(outside_BT, V - 1),
            prompt_ids_BP=experience.prompt_ids_BP.masked_fill(before_BP, V - 2),
            behaviour_logp_BT=nan(experience.behaviour_logp_BT),
            advantage_BT=nan(experience.advantage_BT),
            ref_logp_BT=nan(experience.ref_logp_BT),
            policy_version_BT=experience.policy_version_BT.masked_fill(outside_BT, 99),
        ),
        references=references,
        baselines={position: nan(baseline_BT) for position, baseline_BT in micro.baselines.items()},
    )


@pytest.mark.parametrize(
    ("share", "name"), [(share, name) for share in (True, False) for name in (TERMS if share else MIXED)]
)
def test_what_fills_the_padding_changes_no_bit(share, name):
    path = dataclasses.replace(PATHS["shared_whole"], share=share)
    clean, spoiled = (learn(pair(gpt2, torch.float64), TERMS[name], path, spoil=spoil) for spoil in (None, garbage))
    assert clean.loss == spoiled.loss and torch.equal(clean.gradient, spoiled.gradient)


SAME = [{"k1_reward_own", "k2_loss"}, {"k3_loss_token", "k3_loss_straight_through"}]
"""Equal by identity: k1's own cost on the score is k2's gradient, and so is the ratio times k3's."""


def test_terms_have_gradients_of_their_own():
    """Or the comparisons above would compare the same thing."""
    gradients = {name: slow(gpt2, torch.float64, name) for name in TERMS}
    for one, other in SAME:
        assert far(gradients[one], gradients[other]) < 1e-9
    for name, gradient in gradients.items():
        others = {
            key: far(gradient, other) for key, other in gradients.items() if key != name and {key, name} not in SAME
        }
        nearest = min(others, key=others.get)
        assert others[nearest] > 1e-3, (name, nearest, others[nearest])


def test_a_term_with_beta_0_is_measured_and_cannot_make_nan():
    """Its reference gives a sampled token the probability 0: the estimate is infinite, the loss is not."""
    models, spoiled = pair(gpt2, torch.float64), []

    def spoil(micro):
        logp_BT = micro.references["initial"].logp_BT.masked_fill(micro.experience.mask_BT, -torch.inf)
        reference = dataclasses.replace(micro.references["initial"], logp_BT=logp_BT)
        spoiled.append(dataclasses.replace(micro, references={"initial": reference}))
        return spoiled[-1]

    terms = [KLTerm("k3", baseline="own"), KLTerm("k1", baseline="before"), KLTerm("exact", placement="loss")]
    metric_only = learn(models, terms, TRAINED, spoil=spoil, beta=0.0)
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

    calls, log_softmax = [], head.log_softmax
    monkeypatch.setattr(head, "log_softmax", lambda *given: calls.append(1) or log_softmax(*given))
    hidden_NH, weight_VH = torch.randn(6, 4, requires_grad=True), torch.randn(V, 4)
    other = (torch.randn(6, 4), (weight_VH, None))
    counts = []
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
        counts.append(len(calls))
    assert counts == [9, 12]
