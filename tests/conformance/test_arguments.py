"""Losses with the names, dictionaries and results that trainers give them."""

import functools

import pytest
import torch

from kl_comedy.conformance import adapt, check
from kl_comedy.errors import UserError

ON = {"claims": "token_reverse", "regimes": ("on_policy",)}


def k2(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp) ** 2 * mask


def trl_names(per_token_logps, ref_per_token_logps, completion_mask):
    return k2(per_token_logps, ref_per_token_logps, completion_mask)


def verl_names(log_prob, ref_log_prob, response_mask):
    return k2(log_prob, ref_log_prob, response_mask)


def openrlhf_names(log_probs, log_probs_base, action_mask=None):
    return k2(log_probs, log_probs_base, action_mask)


def one_dictionary(batch):
    return k2(batch["log_probs"], batch["ref_log_prob"], batch["response_mask"])


def attributes_of_a_batch(data):
    return k2(data.logp, data.get("ref_logp"), data.mask)


def with_metrics(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask), {"kl": 0.0}


def in_a_dictionary(logp, ref_logp, mask):
    return {"loss": k2(logp, ref_logp, mask), "metrics": {}}


class Module(torch.nn.Module):
    def forward(self, logprobs, reference_logprobs, loss_mask):
        return k2(logprobs, reference_logprobs, loss_mask)


LOSSES = [
    trl_names,
    verl_names,
    openrlhf_names,
    one_dictionary,
    attributes_of_a_batch,
    with_metrics,
    in_a_dictionary,
    Module(),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: getattr(loss, "__name__", "module"))
def test_the_names_of_trainers_are_known(loss):
    check(loss, **ON).assert_ok()


def own_names(new, others, keep, *, kind):
    assert kind == "k2"
    return [0.0, {"term": k2(new, others["sft"], keep)}]


def test_other_names_are_given_by_adapt():
    loss = functools.partial(own_names, kind="k2")
    arguments = {"new": "logp", "others": {"sft": "ref_logp"}, "keep": "mask"}

    class Term:
        """What a caller does with a result of several layers."""

        def __call__(self, logp, ref_logp, mask):
            return adapt(loss, arguments, 1)(logp=logp, ref_logp=ref_logp, mask=mask)["term"]

    check(Term(), **ON).assert_ok()
    check(adapt(Term(), SAME_NAMES), **ON).assert_ok()


SAME_NAMES = {"logp": "logp", "ref_logp": "ref_logp", "mask": "mask"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adapt(k2, {"logp": "log"}), "arguments.logp: got 'log'; allowed: logp, .* did you mean 'logp'"),
        (lambda: adapt(k2, {"log": "logp"}), "arguments.log: no such key .* did you mean 'logp'"),
        (
            lambda: adapt(in_a_dictionary, SAME_NAMES, "los"),
            "result: got 'los'; .* the keys loss, metrics",
        ),
        (lambda: lambda batch: batch["adv"], r"batch\['adv'\]: no such key"),
        (lambda: lambda logp: {"policy": logp}, "a dictionary with the keys policy; allowed: one with loss, kl_loss"),
        (lambda: lambda logp, ref: logp, "loss_fn.ref: no such key .*kl_comedy.conformance.adapt"),
    ],
)
def test_a_wrong_name_is_refused_in_one_line(make, message):
    with pytest.raises(UserError, match=message) as error:
        check(make(), **ON)
    assert "\n" not in str(error.value)
