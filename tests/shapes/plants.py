"""Bugs that the checks must find. Each replaces a function of the product after the case was loaded, in its process."""

import dataclasses
import functools
from collections.abc import Callable

PLANTS = {}


@dataclasses.dataclass(frozen=True)
class Plant:
    """A bug: ``install`` is called with the rank; ``sign`` is a part of what the checks say about it."""

    install: Callable[[int], None]
    sign: str


def plant(sign):
    """Register a bug under its name with spaces."""

    def register(install):
        PLANTS[install.__name__.replace("_", " ")] = Plant(install, sign)
        return install

    return register


def _wrap(owner, name, wrapper) -> None:
    """Replace ``owner.name`` by ``wrapper``, which gets the original first."""
    setattr(owner, name, functools.partial(wrapper, getattr(owner, name)))


@plant(sign="to be on the same device")
def a_mask_is_made_on_the_cpu(rank):
    import torch

    from kl_comedy.training import loss

    def weighted_sum(_, loss_BT, experience):
        zeros_BT = torch.zeros(loss_BT.shape)
        return (experience.weight_B * torch.where(experience.mask_BT, loss_BT, zeros_BT).sum(-1)).sum()

    _wrap(loss, "weighted_sum", weighted_sum)


@plant(sign="mm of torch.bfloat16 and torch.float32")
def one_factor_of_the_head_is_rounded(rank):
    import torch

    from kl_comedy.models import head

    def product(original, rows_MK, weight_NK, bias_N):
        return original(rows_MK, weight_NK.to(torch.bfloat16), bias_N)

    _wrap(head, "product", product)


@plant(sign="update: waits models/attention.py")
def every_layer_logs_its_largest_value(rank):
    from kl_comedy.models import attention

    def attend_rows(original, *args):
        attended = original(*args)
        float(attended.detach().abs().max())
        return attended

    _wrap(attention, "attend_rows", attend_rows)


@plant(sign="update: collective")
def rank_0_alone_sums_a_metric(rank):
    import torch
    import torch.distributed as dist

    from kl_comedy.training import module

    def accumulate(original, *args, **kwargs):
        if rank == 0:
            dist.all_reduce(torch.zeros(1, device="cuda"))
        return original(*args, **kwargs)

    _wrap(module, "accumulate_micro_batch", accumulate)


@plant(sign="list index out of range")
def a_rank_without_rows_makes_no_pass(rank):
    from kl_comedy.training.distributed import Ranks

    Ranks.split = lambda ranks, items: list(items[ranks.rank :: ranks.size])


@plant(sign="bytes of an update are left")
def logits_are_kept(rank):
    from kl_comedy.models import head

    passes = []

    def log_softmax(original, *args, **kwargs):
        logp_nV = original(*args, **kwargs)
        passes.append(logp_nV)
        return logp_nV

    _wrap(head, "log_softmax", log_softmax)


@plant(sign="cumsum has no deterministic kernel")
def floats_are_summed_by_cumsum(rank):
    from kl_comedy.training import module

    def accumulate(original, metrics, micro, *args, **kwargs):
        micro.experience.behaviour_logp_BT.cumsum(-1)
        return original(metrics, micro, *args, **kwargs)

    _wrap(module, "accumulate_micro_batch", accumulate)


@plant(sign="has no gradient")
def hidden_states_are_detached(rank):
    from kl_comedy.models import logprobs

    _wrap(logprobs, "completion_hidden", lambda original, *args, **kwargs: original(*args, **kwargs).detach())


@plant(sign="update: collectives")
def whole_gradients_are_gathered_to_clip_them(rank):
    from kl_comedy.training import module

    def clip(original, parameters, bound):
        parameters = list(parameters)
        for parameter in parameters:
            parameter.grad.full_tensor()
        return original(parameters, bound)

    _wrap(module, "clip_gradients", clip)


@plant(sign="update: flop float32")
def the_head_is_computed_twice(rank):
    from kl_comedy.models import head

    def log_softmax(original, *args, **kwargs):
        original(*args, **kwargs)
        return original(*args, **kwargs)

    _wrap(head, "log_softmax", log_softmax)


@plant(sign="update: flop bfloat16")
def the_reference_pass_is_made_twice(rank):
    from kl_comedy.models.reference import Reference

    forward_pass = Reference.forward_pass

    def twice(reference, **inputs):
        forward_pass(reference, **inputs)
        return forward_pass(reference, **inputs)

    Reference.forward_pass = twice


@plant(sign="publication: wire_bytes float32")
def weights_are_published_in_float32(rank):
    from kl_comedy.models import weights

    weights._cast = lambda tensor, dtype: tensor


@plant(sign="publication: collectives")
def weights_are_gathered_one_by_one(rank):
    from kl_comedy.models import weights

    weights.BUCKET_BYTES = 1


@plant(sign="publication: waits")
def weights_are_copied_to_the_host_one_by_one(rank):
    from kl_comedy.rollouts.engines import transports

    transports.BUCKET_BYTES = 1


TOGETHER = {
    0: [
        ["a mask is made on the cpu"],
        [
            "one factor of the head is rounded",
            "every layer logs its largest value",
            "floats are summed by cumsum",
            "hidden states are detached",
            "the head is computed twice",
            "weights are published in float32",
            "weights are copied to the host one by one",
        ],
        [
            "logits are kept",
            "whole gradients are gathered to clip them",
            "the reference pass is made twice",
            "weights are gathered one by one",
        ],
        ["rank 0 alone sums a metric"],
    ],
    3: [["a rank without rows makes no pass"]],
}
"""By rank: bugs that can be in one update, because the sign of each is there for no other of them."""
