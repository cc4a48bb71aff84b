"""What an update costs: tokens per second and device, model FLOP utilization, memory."""

import time
from types import SimpleNamespace

import pytest
import torch

from kl_comedy.config.schema import LoraConfig
from kl_comedy.models.lora import add_lora
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.costs import (
    Machine,
    cost_metrics,
    gpus_of_servers,
    operations_per_token,
    passed_tokens,
    peak_memory,
    product_rate,
)
from small_llama import V, llama

CPU = torch.device("cpu")
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 16, 24, 2, 4, 2


def row(group, prompt, completion, trained=(), restarts=()):
    prompt = Prompt(problem=Problem(id="p", text="", answer=""), text="", token_ids=(1,) * prompt)
    versions = tuple(0 if drawn else -1 for drawn in trained) or (0,) * completion
    rollout = Rollout(
        prompt=prompt,
        group_id=group,
        completion_ids=(2,) * completion,
        logps=(0.0,) * completion,
        versions=versions,
        stop_reason="eos",
        text="",
        trained=trained,
        restarts=restarts,
    )
    return Scored(rollout=rollout, reward=Reward(value=0.0))


ROWS = [
    row(0, 5, 4),
    row(0, 5, 3, trained=(True, False, True)),
    row(1, 7, 2, restarts=((1, (3, 3)),)),
]


def matrices():
    """Parameters of the layers of the tiny Llama that tokens are multiplied with, from its sizes, and its norms."""
    kv = HIDDEN // HEADS * KV_HEADS
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * kv + 3 * HIDDEN * INNER + 2 * HIDDEN
    return LAYERS * layer + HIDDEN


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_is_only_read_costs_no_operation(tied):
    assert operations_per_token(llama(tied=tied)) == 6 * (matrices() + V * HIDDEN)


def test_a_frozen_parameter_costs_no_gradient_of_its_own():
    model = add_lora(llama(), LoraConfig(rank=2, target_modules=["q_proj"]))
    factors = LAYERS * 2 * 2 * HIDDEN
    assert operations_per_token(model) == 4 * (matrices() + V * HIDDEN) + 6 * factors


def test_a_shared_prompt_is_passed_once_a_group():
    completions = 4 + 3 + 2
    second_row = 2
    assert passed_tokens(ROWS, share_prompt=False) == completions + second_row + 5 + 5 + 7
    assert passed_tokens(ROWS, share_prompt=True) == completions + second_row + 5 + 7


def test_an_updates_costs_by_hand():
    machine = Machine(ranks=2, devices=3, products=1000.0, operations=30.0, share_prompt=True)
    metrics = cost_metrics(ROWS, machine, step_s=4.0, learn_s=2.0)
    drawn = 4 + 2 + 2
    assert metrics["time/tokens_per_second_per_device"] == pytest.approx(drawn / 4.0 / 3)
    assert metrics["time/flop_utilization"] == pytest.approx(30.0 * 23 / (2.0 * 2 * 1000.0))


@pytest.mark.parametrize(
    ("gpus", "of_servers", "expected"),
    [([], [], 0), (["0"], [], 0), (list("0123"), ["2,3"], 2), (list("0123"), ["1,2"], 1)],
    ids=["a CPU", "one GPU for both", "GPUs of their own", "one shared with a rank"],
)
def test_gpus_of_servers_are_counted_once(gpus, of_servers, expected):
    sampler = SimpleNamespace(ranks_per_node=2, server_gpus=lambda gpus: of_servers)
    assert gpus_of_servers(sampler, gpus) == expected


def test_products_are_measured_in_less_than_a_second_and_once():
    start = time.process_time()
    rate = product_rate(CPU, torch.float32)
    assert time.process_time() - start < 1.0
    assert 1e8 < rate < 1e14
    assert product_rate(CPU, torch.float32) == rate


def test_memory_that_was_touched_counts():
    before = peak_memory(CPU)
    touched = torch.ones(2**26)
    assert peak_memory(CPU) >= max(before, touched.nbytes / 2**30)
