"""Losses with the names, dictionaries and results that trainers give them."""

import dataclasses
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


def in_a_list(logp, ref_logp, mask):
    return [k2(logp, ref_logp, mask), 0.0]


@dataclasses.dataclass
class Output:
    """A record, as transformers' outputs are."""

    loss: torch.Tensor


def in_a_record(logp, ref_logp, mask):
    return Output(loss=k2(logp, ref_logp, mask))


def mask_in_the_labels(logps, ref_logps, labels):
    return k2(logps, ref_logps, labels != -100)


def attended_and_trained(logps, ref_logps, attention_mask, loss_mask):
    """``attention_mask`` covers a tool's reply, ``loss_mask`` does not."""
    return k2(logps, ref_logps, attention_mask * loss_mask)


def trainers_names_as_keywords(**batch):
    return k2(batch["log_probs"], batch["ref_log_prob"], batch["response_mask"])


def options_behind_the_tensors(logp, ref_logp, mask, *args, **kwargs):
    assert args == ()
    assert kwargs == {}
    return k2(logp, ref_logp, mask)


def logits_of_both(student_logits, teacher_logits, mask):
    student = student_logits.log_softmax(-1)
    return (student.exp() * (student - teacher_logits.log_softmax(-1))).sum(-1) * mask


def metrics_left_in_the_batch(batch):
    batch["metrics"] = {"kl": 0.0}
    return k2(batch["logp"], batch["ref_logp"], batch["mask"])


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
    in_a_list,
    in_a_record,
    mask_in_the_labels,
    attended_and_trained,
    trainers_names_as_keywords,
    options_behind_the_tensors,
    logits_of_both,
    metrics_left_in_the_batch,
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


def test_a_mask_of_attention_alone_trains_on_the_replies_of_tools():
    def loss(logps, ref_logps, attention_mask):
        return k2(logps, ref_logps, attention_mask).sum(-1)

    assert "mask: tokens 2, 3, 5" in str(check(loss, **ON))
    check(loss, masked_tokens="absent", **ON).assert_ok()


def test_a_compiled_loss_is_differentiated_once():
    """Its graph may be gone after one backward."""

    @functools.partial(torch.compile, backend="aot_eager")
    def loss(logp, ref_logp, mask):
        return (0.5 * (logp - ref_logp).square() * mask).sum(-1)

    check(loss, **ON).assert_ok()


SAME_NAMES = {"logp": "logp", "ref_logp": "ref_logp", "mask": "mask"}


def replaces_a_tensor_of_the_batch(batch):
    batch["logp"] = batch["logp"] * batch["mask"]
    return k2(batch["logp"], batch["ref_logp"], batch["mask"])


def replaces_it_under_another_name(batch):
    batch["log_probs"] = batch["logp"] * batch["mask"]
    return k2(batch["log_probs"], batch["ref_logp"], batch["mask"])


class Method:
    def loss(self, logp):
        return logp


async def coroutine(logp):
    return logp


def ends_the_process(logp):
    raise SystemExit(0)


def raises_several_lines(logp):
    raise ValueError("the first line\nthe second line")


class BackwardRaises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp):
        return logp * 1.0

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("backward")


def backward_raises(logp, mask):
    return BackwardRaises.apply(logp) * mask


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adapt(k2, {"logp": "log"}), "arguments.logp: got 'log'; did you mean 'logp'"),
        (lambda: adapt(k2, {"log": "logp"}), "arguments.log: no such key .* did you mean 'logp'"),
        (
            lambda: adapt(in_a_dictionary, SAME_NAMES, "los"),
            "result: got 'los'; .* the keys loss, metrics",
        ),
        (lambda: lambda batch: batch["adv"], r"batch\['adv'\]: no such key"),
        (lambda: lambda logp: {"policy": logp}, "a dictionary with the keys policy; allowed: one with loss, kl_loss"),
        (lambda: replaces_a_tensor_of_the_batch, r"changes its argument batch in place \(logp\)"),
        (lambda: replaces_it_under_another_name, r"changes its argument batch in place \(log_probs\)"),
        (lambda: Method.loss, "loss_fn.self: it is a method of a class"),
        (lambda: coroutine, "loss_fn: it is an async function"),
        (lambda: ends_the_process, "loss_fn: it raised SystemExit: 0"),
        (lambda: raises_several_lines, "loss_fn: it raised ValueError: the first line$"),
        (lambda: backward_raises, "loss_fn: its backward raised RuntimeError: backward"),
        (lambda: lambda logp, mask: (logp * mask).to("meta"), "loss_fn: got 'a tensor of torch.float64 on meta'"),
        (lambda: lambda logp, mask: logp * mask * 1j, "loss_fn: got 'a tensor of torch.complex128 on cpu'"),
        (lambda: lambda logp, ref: logp, "loss_fn.ref: no tensor has this name.*kl_comedy.conformance.adapt"),
    ],
)
def test_a_wrong_name_is_refused_in_one_line(make, message):
    with pytest.raises(UserError, match=message) as error:
        check(make(), **ON)
    assert "\n" not in str(error.value)
