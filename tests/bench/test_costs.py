"""Regression guard: operations counted, not seconds. A change that makes a hot path dearer fails here.

Floating-point operations are those of matrix products and attention; margins are stated at each bound.
"""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from kl_comedy.kl import KLTerm
from kl_comedy.models import onednn_linear
from kl_comedy.models.reference import Reference
from kl_comedy.models.types import PassOptions
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts import Sampling
from kl_comedy.rollouts.decoding import Draws, StopStrings, decode
from passes import head_columns, token_pass

V = 97
H = 48
INNER = 128
LAYERS = 3
HEADS = 6
KV = 2
PROMPT = 40
GROUP = 8
LENGTH = 24
# Per layer: queries and output, keys and values, three matrices of the feed-forward part.
BODY = LAYERS * (2 * H * H + 2 * H * (H * KV // HEADS) + 3 * H * INNER)
"""Weights that every token of the line is multiplied with."""

HEAD = H * V
MARGIN = 1.02
"""Two percent: what may come on top of the products that are written down here."""


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def batch(groups=2):
    rows = groups * GROUP
    prompts = torch.randint(0, V, (groups, PROMPT), generator=torch.Generator().manual_seed(0))
    return {
        "prompt_ids_BP": prompts.repeat_interleave(GROUP, 0),
        "prompt_mask_BP": torch.ones(rows, PROMPT, dtype=torch.long),
        "ids_BT": torch.randint(0, V, (rows, LENGTH), generator=torch.Generator().manual_seed(1)),
        "mask_BT": torch.ones(rows, LENGTH, dtype=torch.bool),
    }


def flops(work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def attention(groups, *, ratio=1.0):
    """Scores and sums of prompts over themselves and of completions over prompt and themselves.

    The CPU's attention kernel is not among the operations that torch counts; these are then bounds from above.
    """
    own = LENGTH - 1
    attended = groups * (PROMPT * PROMPT + GROUP * own * (PROMPT + own))
    return ratio * LAYERS * 4 * H * attended


LINE = 2 * (PROMPT + GROUP * (LENGTH - 1))
"""Tokens that go through the body: each prompt once, and of a completion all but the last."""
COMPLETION = 2 * GROUP * LENGTH
"""Tokens whose log-probs the head computes."""


def test_a_forward_pass_computes_every_token_once():
    measured = flops(lambda: token_pass(llama(), **batch(), temperature=1.0, chunk_elements=10**9))
    products = 2 * (BODY * LINE + HEAD * COMPLETION)
    assert products * 0.98 < measured
    assert measured < (products + attention(2)) * MARGIN


@pytest.mark.parametrize(("chunk", "recomputed"), [(10**9, 0), (V * 16, 1)], ids=["one chunk", "in chunks"])
def test_a_backward_pass_costs_twice_a_forward_and_a_head_where_it_is_computed_again(chunk, recomputed):
    model = llama()

    def learn():
        token_pass(model, **batch(), temperature=1.0, chunk_elements=chunk).logp_BT.sum().backward()

    # Attention's backward computes its scores again: 2.5 forwards.
    expected = 2 * 3 * BODY * LINE + 2 * (3 + recomputed) * HEAD * COMPLETION + attention(2, ratio=3.5)
    assert flops(learn) < expected * MARGIN


@pytest.fixture(scope="module")
def learning_flops():
    """The operations of forward and backward, by what is computed beside the log-probs."""
    inputs = batch()
    reference = Reference(llama(), PassOptions(temperature=1.0, chunk_elements=10**9)).forward_pass(**inputs)

    def learn(**requested):
        scored = token_pass(llama(), **inputs, temperature=1.0, chunk_elements=10**9, reference=reference, **requested)
        loss = scored.logp_BT.sum()
        if scored.kl_BT is not None:
            loss = (scored.logp_BT + scored.kl_BT).sum()
        loss.backward()

    return {
        "log-probs": flops(learn),
        "exact KL": flops(lambda: learn(kl=True)),
        "metrics": flops(lambda: learn(kl=True, entropy=True, total_variation=True)),
    }


def test_an_exact_kl_costs_two_heads(learning_flops):
    """The reference's distributions; nothing again in the backward pass, because the chunk is kept."""
    assert learning_flops["exact KL"] - learning_flops["log-probs"] == 2 * HEAD * COMPLETION


def test_metrics_of_the_distribution_cost_no_product(learning_flops):
    assert learning_flops["metrics"] == learning_flops["exact KL"]


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_no_estimator_of_a_term_asks_for_more_than_it_says(name):
    assert KLTerm(estimator=name).needs == "log_ratio"


def prompts():
    rows = batch()["prompt_ids_BP"][::GROUP].tolist()
    return [Prompt(problem=Problem(id="p", text="", answer=""), text="", token_ids=tuple(row)) for row in rows]


def draw(model, *, ends=(), tokens=LENGTH):
    """The completions of two groups; with the same uniform numbers every time."""
    sampling = Sampling(temperature=1.0, max_new_tokens=tokens)
    uniform_BT = torch.rand(2 * GROUP, tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = Draws(sampling=sampling, uniform_BT=uniform_BT, ends=ends, stops=StopStrings(None, ()))
    with torch.no_grad():
        return decode(model, prompts(), [0] * GROUP + [1] * GROUP, draws, version=lambda: 0)


@pytest.fixture
def adopted():
    from kl_comedy.models.attention import use_layout_attention

    model = llama().eval()
    assert use_layout_attention(model)
    return model


def test_sampling_computes_a_prompt_once_and_every_token_once(adopted):
    measured = flops(lambda: draw(adopted))
    steps = LENGTH - 1
    tokens = 2 * PROMPT + 2 * GROUP * steps
    # Each new token attends to the prompt, to the tokens before it and to itself.
    pairs = 2 * GROUP * (steps * PROMPT + steps * (steps + 1) // 2)
    expected = 2 * (BODY * tokens + HEAD * COMPLETION) + LAYERS * 4 * H * pairs
    assert expected * 0.98 < measured < expected * MARGIN


def test_rows_that_end_are_paid_for_a_little_longer_at_most(adopted):
    """Ended rows leave when a fifth has ended: at most a quarter more row-tokens than were drawn."""
    ends = tuple(range(0, V, 6))
    measured = flops(lambda: draw(adopted, ends=ends, tokens=60))
    drawn = sum(len(row.ids) for row in draw(adopted, ends=ends, tokens=60))
    computed = 1.25 * drawn
    body = 2 * BODY * (2 * PROMPT + computed)
    head = 2 * HEAD * (computed + 2 * GROUP)
    attended = LAYERS * 4 * H * (2 * PROMPT**2 + computed * (PROMPT + 60))
    assert measured < body + head + attended


class Calls(TorchDispatchMode):
    """Counts the operations that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += 1
        self.names.add(function.overloadpacket.__name__)
        return function(*arguments, **(named or {}))


OPERATIONS = 152
"""Per token and layer, when this was written; half of them are views."""


def operations_of(model, tokens):
    with Calls() as calls:
        draw(model, tokens=tokens)
    return calls.count


def test_a_token_asks_torch_for_few_operations_whatever_the_number_of_rows(adopted):
    # The difference of two lengths: the prompt's operations are not counted.
    per_token = (operations_of(adopted, 12) - operations_of(adopted, 4)) / 8
    assert per_token / LAYERS < 1.1 * OPERATIONS, "a tenth more is allowed"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_every_product_with_weights_is_onednns_where_the_layers_are(adopted, monkeypatch):
    monkeypatch.setenv(onednn_linear.VARIABLE, "onednn")
    monkeypatch.setattr(onednn_linear, "MIN_ELEMENTS", 1)
    onednn_linear.use_onednn_linears(adopted)
    with Calls() as calls:
        draw(adopted, tokens=4)
    assert not calls.names & {"mm", "addmm"}


@pytest.mark.parametrize("kl", [[], ["kl"], ["kl", "forward_kl"]], ids=str)
def test_the_heads_backward_holds_no_more_than_it_says(kl):
    """Storages of ``[n, V]`` alive at once, forward and backward, by counting: at most six of a chunk's size."""
    rows = 64
    chunk_rows = 16
    vocabulary = 50 * V
    hidden_NH = torch.randn(rows, H, requires_grad=True)
    reference = (torch.randn(rows, H), (torch.randn(vocabulary, H), None))
    weight_VH = torch.randn(vocabulary, H, requires_grad=True)
    with Alive(chunk_rows * vocabulary * 4) as alive:
        columns = head_columns(
            hidden_NH,
            (weight_VH, None),
            torch.arange(rows),
            temperature=0.9,
            chunk_elements=chunk_rows * vocabulary,
            requested=kl,
            reference=reference,
        )
        sum(column.sum() for column in columns.values()).backward()
    assert 1 <= alive.most <= 6


class Alive(TorchDispatchMode):
    """The most storages of exactly ``size`` bytes that are alive at one time."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.most = 0
        # Weak, or every tensor would stay alive.
        self._references = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() == self.size:
                self._references.append(weakref.ref(leaf))
        self._count_storages()
        return result

    def _count_storages(self):
        alive = []
        storages = set()
        for reference in self._references:
            tensor = reference()
            if tensor is not None:
                alive.append(reference)
                storages.add(tensor.untyped_storage().data_ptr())  # a view shares it
        self._references = alive
        self.most = max(self.most, len(storages))


def test_the_count_of_storages_counts():
    arrays = []
    with Alive(400) as alive:
        for _ in range(3):
            arrays.append(torch.zeros(100).view(10, 10))
            torch.ones(100)  # freed at once
    assert alive.most == 4, "three in the list and one that is freed"
