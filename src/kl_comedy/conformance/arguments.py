"""How a loss is called: which tensors go to which of its parameters, and which part of its result is the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value, unknown_key

ARGUMENTS = ("logp", "ref_logp", "behaviour_logp", "mask", "tokens", "logp_full", "ref_logp_full")

# What trainers call these tensors. Only names that mean one thing in every trainer we have read: `kl_mask` or `old_kl`
# would be guesses, and a wrong guess would give a wrong verdict. All other names are given to `adapt`.
_NAMES_IN_TRAINERS = {
    "logp": "logps logprob logprobs log_prob log_probs per_token_logps new_logprobs action_log_probs curr_logprobs",
    "ref_logp": "ref_logps ref_logprob ref_logprobs ref_log_prob ref_log_probs ref_per_token_logps log_probs_base "
    "base_action_log_probs reference_logprobs",
    "behaviour_logp": "old_logps old_logprobs old_log_prob old_log_probs old_per_token_logps old_action_log_probs "
    "behavior_logp sampling_per_token_logps rollout_log_probs",
    "mask": "masks action_mask completion_mask response_mask loss_mask token_mask",
    "tokens": "token_ids completion_ids response_ids labels",
    "logp_full": "full_log_probs",
    "ref_logp_full": "ref_full_log_probs",
}
ALIASES = {alias: name for name, aliases in _NAMES_IN_TRAINERS.items() for alias in aliases.split()}
BATCHES = ("batch", "data", "inputs", "micro_batch", "model_inputs", "experience")
"""Parameters that get all tensors in one dictionary."""
RESULTS = ("loss", "kl_loss", "kl")
"""Keys of a returned dictionary under which the loss is looked for."""

Call = Callable[[Mapping[str, Tensor]], Any]


class BatchOfTensors(dict[str, Any]):
    """A dictionary of tensors that also knows trainers' names, and gives its entries as attributes."""

    def __missing__(self, key: str) -> Any:
        name = ALIASES.get(key)
        if name is None or name not in self:
            raise unknown_key(f"loss_fn: batch[{key!r}]", key, (*self, *ALIASES), "a key of the batch")
        return self[name]

    def __getattr__(self, name: str) -> Any:
        # Python asks for special names itself, and must not get a tensor's error for them.
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def get(self, key: str, default: Any = None) -> Any:
        """The entry, under our name or a trainer's; ``default`` where there is none."""
        if key in self:
            return self[key]
        name = ALIASES.get(key)
        if name is None:
            return default
        return super().get(name, default)


def adapt(
    loss_fn: Callable[..., Any], arguments: Mapping[str, Any], result: str | int | None = None
) -> Callable[..., Any]:
    """A loss for :func:`check` from one with parameters, dictionaries or results of its own.

    ``arguments`` has an entry for each parameter of ``loss_fn``: the name of a tensor (``"logp"``), a mapping from keys
    to names of tensors for a dictionary, or any value that is not text, which is passed as it is. ``result`` is the key
    or the position of the loss in what ``loss_fn`` returns.

    >>> def theirs(policy, extra, scale):
    ...     return {"kl_term": scale * 0.5 * (policy - extra["sft"]) ** 2 * extra["keep"]}
    >>> loss = adapt(theirs, {"policy": "logp", "extra": {"sft": "ref_logp", "keep": "mask"}, "scale": 0.1}, "kl_term")
    >>> from kl_comedy.conformance import check
    >>> check(loss, claims="token_reverse", regimes=("on_policy",)).ok
    True

    Raises :class:`UserError` for a name that none of the tensors has, and a parameter that ``loss_fn`` does not have.
    """
    own_names = _parameter_names(loss_fn)
    for parameter, source in arguments.items():
        if own_names is not None and parameter not in own_names:
            raise unknown_key(f"arguments.{parameter}", parameter, own_names, "a parameter of the loss")
        sources = [source]
        if isinstance(source, Mapping):
            sources = list(source.values())
        for name in sources:
            if isinstance(name, str) and name not in ARGUMENTS:
                raise bad_value(f"arguments.{parameter}", name, ARGUMENTS, "text is the name of a tensor")

    def adapted(**tensors: Any) -> Any:
        given: dict[str, Any] = {}
        for parameter, source in arguments.items():
            if isinstance(source, str):
                given[parameter] = tensors[source]
            elif isinstance(source, Mapping):
                given[parameter] = BatchOfTensors({key: tensors[name] for key, name in source.items()})
            else:
                given[parameter] = source
        returned = loss_fn(**given)
        if result is None:
            return returned
        try:
            return returned[result]
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"result: got {result!r}; the loss returned {_described(returned)}") from error

    return adapted


def _parameter_names(loss_fn: Callable[..., Any]) -> list[str] | None:
    """The names of the parameters; None where any name may be given."""
    parameters = _signature(loss_fn)
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def loss_of(returned: Any) -> Any:
    """The loss in what a function returned: itself, the first of a tuple, or a dictionary's entry ``loss``."""
    if isinstance(returned, tuple) and returned and isinstance(returned[0], Tensor):
        return returned[0]
    if isinstance(returned, Mapping):
        for key in RESULTS:
            if key in returned:
                return returned[key]
        raise UserError(
            f"loss_fn: it returned {_described(returned)}; allowed: one with {', '.join(RESULTS)}, or name the key: "
            "adapt(loss_fn, arguments, result=KEY)"
        )
    return returned


def _described(returned: Any) -> str:
    if isinstance(returned, Mapping):
        return f"a dictionary with the keys {', '.join(map(str, returned)) or '(none)'}"
    return f"a {type(returned).__name__}"


def caller(loss_fn: Callable[..., Any]) -> Call:
    """A function that calls the loss with those tensors that its parameters name; a module's are those of its forward.

    Raises :class:`UserError` for parameters that are none of the tensors.
    """
    by_position: list[str] = []
    # Our name by the loss's own.
    by_name: dict[str, str] = {}
    in_one_dictionary: list[str] = []
    takes_any_name = False
    for parameter in _parameters(loss_fn):
        name = ALIASES.get(parameter.name, parameter.name)
        if parameter.kind == parameter.VAR_KEYWORD:
            takes_any_name = True
        elif name in ARGUMENTS:
            if parameter.kind == parameter.POSITIONAL_ONLY:
                by_position.append(name)
            else:
                by_name[parameter.name] = name
        elif parameter.name in BATCHES and parameter.default is parameter.empty:
            in_one_dictionary.append(parameter.name)
    names_any = len(by_position) + len(by_name) + len(in_one_dictionary) > 0
    # With **kwargs alone the loss gets everything; beside names of its own, **kwargs are the caller's further options.
    if takes_any_name and not names_any:
        by_name = {name: name for name in ARGUMENTS}

    def call(tensors: Mapping[str, Tensor]) -> Any:
        positional = [tensors[name] for name in by_position]
        named: dict[str, Any] = {own: tensors[name] for own, name in by_name.items()}
        for own in in_one_dictionary:
            named[own] = BatchOfTensors(tensors)
        try:
            return loss_of(loss_fn(*positional, **named))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"loss_fn: it raised {type(error).__name__}: {error}") from error

    return call


def _signature(loss_fn: Callable[..., Any]) -> list[inspect.Parameter]:
    if isinstance(loss_fn, type):
        raise UserError(f"loss_fn: {loss_fn.__name__} is a class; give an instance of it")
    described: Callable[..., Any] = loss_fn
    if isinstance(loss_fn, torch.nn.Module):
        described = loss_fn.forward  # a module's own signature is *args, **kwargs
    try:
        return list(inspect.signature(described).parameters.values())
    except (TypeError, ValueError):
        raise UserError("loss_fn: its parameters cannot be read; wrap it in a function that names them") from None


def _parameters(loss_fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of the loss. Raises :class:`UserError` for those that no tensor can be given to."""
    parameters = _signature(loss_fn)
    for parameter in parameters:
        if parameter.kind == parameter.VAR_POSITIONAL:
            raise UserError(
                f"loss_fn: it takes *args; wrap it in a function with parameters among {', '.join(ARGUMENTS)}"
            )
    for parameter in parameters:
        is_known = parameter.name in ARGUMENTS or parameter.name in ALIASES or parameter.name in BATCHES
        takes_many = parameter.kind == parameter.VAR_KEYWORD
        has_default = parameter.default is not parameter.empty
        if not is_known and not takes_many and not has_default:
            raise unknown_key(
                f"loss_fn.{parameter.name}",
                "a parameter",
                ARGUMENTS,
                "it is called with tensors by name; for other names see kl_comedy.conformance.adapt",
            )
    return parameters
