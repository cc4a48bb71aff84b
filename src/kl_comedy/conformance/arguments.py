"""How a loss is called: which tensors go to which of its parameters, and which part of its result is the loss."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value, nearest, unknown_key

ARGUMENTS = (
    "logp",
    "ref_logp",
    "behaviour_logp",
    "mask",
    "tokens",
    "logp_full",
    "ref_logp_full",
    "attention_mask",
    "labels",
    "logits",
    "ref_logits",
)

# What trainers call these tensors. Only names that mean one thing in every trainer we have read: `kl_mask` or `old_kl`
# would be guesses, and a wrong guess would give a wrong verdict. All other names are given to `adapt`.
ALIASES = {
    "logps": "logp",
    "logprob": "logp",
    "logprobs": "logp",
    "log_prob": "logp",
    "log_probs": "logp",
    "per_token_logps": "logp",
    "new_logprobs": "logp",
    "action_log_probs": "logp",
    "curr_logprobs": "logp",
    "new_logp": "logp",
    "new_logps": "logp",
    "new_log_probs": "logp",
    "policy_logps": "logp",
    "policy_logprobs": "logp",
    "pi_logprobs": "logp",
    "ref_logps": "ref_logp",
    "ref_logprob": "ref_logp",
    "ref_logprobs": "ref_logp",
    "ref_log_prob": "ref_logp",
    "ref_log_probs": "ref_logp",
    "ref_per_token_logps": "ref_logp",
    "log_probs_base": "ref_logp",
    "base_action_log_probs": "ref_logp",
    "reference_logp": "ref_logp",
    "reference_logps": "ref_logp",
    "reference_logprobs": "ref_logp",
    "reference_policy_logprobs": "ref_logp",
    "old_logp": "behaviour_logp",
    "old_logps": "behaviour_logp",
    "old_logprob": "behaviour_logp",
    "old_logprobs": "behaviour_logp",
    "old_log_prob": "behaviour_logp",
    "old_log_probs": "behaviour_logp",
    "old_per_token_logps": "behaviour_logp",
    "old_action_log_probs": "behaviour_logp",
    "behavior_logp": "behaviour_logp",
    "sampling_per_token_logps": "behaviour_logp",
    "rollout_log_probs": "behaviour_logp",
    "masks": "mask",
    "action_mask": "mask",
    "completion_mask": "mask",
    "response_mask": "mask",
    "loss_mask": "mask",
    "loss_masks": "mask",
    "token_mask": "mask",
    "tool_mask": "mask",
    "token_ids": "tokens",
    "completion_ids": "tokens",
    "response_ids": "tokens",
    "full_log_probs": "logp_full",
    "ref_full_log_probs": "ref_logp_full",
    "policy_logits": "logits",
    "student_logits": "logits",
    "reference_logits": "ref_logits",
    "teacher_logits": "ref_logits",
}
"""Our name of a tensor, by a trainer's."""
BATCHES = ("batch", "data", "inputs", "micro_batch", "model_inputs", "experience")
"""Parameters that get all tensors in one dictionary."""
RESULTS = ("loss", "kl_loss", "kl")
"""Keys of a returned dictionary, or attributes of a returned record, under which the loss is looked for."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A loss that is called with tensors by our names. ``names``: those that it takes."""

    names: tuple[str, ...]
    loss: Callable[[Mapping[str, Tensor]], Any]

    def __call__(self, tensors: Mapping[str, Tensor]) -> Any:
        return self.loss(tensors)


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

    def check_unchanged(self, parameter: str, tensors: Mapping[str, Tensor]) -> None:
        """Raise :class:`UserError` where a tensor that was given has another in its place, or is gone.

        New keys are allowed: many losses leave their metrics in the batch.
        """
        for key, tensor in tensors.items():
            if self.get(key) is not tensor:
                raise UserError(f"loss_fn: it changes its argument {parameter} in place ({key}); work on a copy")
        for alias, name in ALIASES.items():
            if alias in self and super().__getitem__(alias) is not tensors[name]:
                raise UserError(f"loss_fn: it changes its argument {parameter} in place ({alias}); work on a copy")


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
    _check_arguments(loss_fn, arguments)

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
        if isinstance(result, str) and hasattr(returned, result):
            return getattr(returned, result)
        try:
            return returned[result]
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"result: got {result!r}; the loss returned {_described(returned)}") from error

    return adapted


def _check_arguments(loss_fn: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` for a parameter that the loss does not have, and a name that no tensor has."""
    parameter_names = _parameter_names(loss_fn)
    for parameter, source in arguments.items():
        if parameter_names is not None and parameter not in parameter_names:
            raise unknown_key(f"arguments.{parameter}", parameter, parameter_names, "a parameter of the loss")
        tensor_names = [source]
        if isinstance(source, Mapping):
            tensor_names = list(source.values())
        for name in tensor_names:
            # Other values than text are options of the loss, and passed as they are.
            if isinstance(name, str) and name not in ARGUMENTS:
                raise bad_value(f"arguments.{parameter}", name, ARGUMENTS, "text is the name of a tensor")


def _parameter_names(loss_fn: Callable[..., Any]) -> list[str] | None:
    """The names of the parameters; None where any name may be given."""
    parameters = _signature(loss_fn)
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def loss_of(returned: Any) -> Any:
    """The loss in what a function returned: itself, the first of a tuple, or an entry or attribute ``loss``."""
    if isinstance(returned, tuple | list) and returned and isinstance(returned[0], Tensor):
        return returned[0]
    if isinstance(returned, Mapping):
        for key in RESULTS:
            if key in returned:
                return returned[key]
        raise UserError(
            f"loss_fn: it returned {_described(returned)}; allowed: one with {', '.join(RESULTS)}, or name the key: "
            "adapt(loss_fn, arguments, result=KEY)"
        )
    if not isinstance(returned, Tensor):
        for name in RESULTS:
            # A record, as the outputs of transformers are.
            if isinstance(getattr(returned, name, None), Tensor):
                return getattr(returned, name)
    return returned


def _described(returned: Any) -> str:
    if isinstance(returned, Mapping):
        keys = "(none)"
        if returned:
            keys = ", ".join(str(key) for key in returned)
        return f"a dictionary with the keys {keys}"
    return f"a {type(returned).__name__}"


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """What a loss takes of a batch: tensors by position, tensors by parameter, and parameters that get the batch."""

    by_position: Sequence[str]
    by_parameter: Mapping[str, str]
    batch_parameters: Sequence[str]

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that the loss can read."""
        if self.batch_parameters:
            return ARGUMENTS
        return tuple(dict.fromkeys([*self.by_position, *self.by_parameter.values()]))


def caller(loss_fn: Callable[..., Any]) -> Call:
    """A function that calls the loss with those tensors that its parameters name; a module's are those of its forward.

    Raises :class:`UserError` for parameters that are none of the tensors.
    """
    taken = _taken_by(loss_fn)

    def call(tensors: Mapping[str, Tensor]) -> Any:
        positional = [tensors[name] for name in taken.by_position]
        named: dict[str, Any] = {parameter: tensors[name] for parameter, name in taken.by_parameter.items()}
        batches = {parameter: BatchOfTensors(tensors) for parameter in taken.batch_parameters}
        with _errors_of_the_loss():
            returned = loss_fn(*positional, **named, **batches)
        for parameter, batch in batches.items():
            batch.check_unchanged(parameter, tensors)
        return loss_of(returned)

    return Call(names=taken.names, loss=call)


def _taken_by(loss_fn: Callable[..., Any]) -> _Taken:
    """What the loss takes, by the names of its parameters."""
    by_position: list[str] = []
    by_parameter: dict[str, str] = {}
    batch_parameters: list[str] = []
    takes_any_name = False
    parameters = _parameters(loss_fn)
    takes_tool_mask = any(parameter.name == "tool_mask" for parameter in parameters)
    for parameter in parameters:
        name = ALIASES.get(parameter.name, parameter.name)
        if parameter.name == "completion_mask" and takes_tool_mask:
            # As in TRL: beside a mask of its own for tools, that of the completion has a tool's replies too.
            name = "attention_mask"
        if parameter.kind == parameter.VAR_KEYWORD:
            takes_any_name = True
        elif name in ARGUMENTS and parameter.kind == parameter.POSITIONAL_ONLY:
            by_position.append(name)
        elif name in ARGUMENTS:
            by_parameter[parameter.name] = name
        elif parameter.name in BATCHES and parameter.default is parameter.empty:
            # With a default, as `data=None`, it is an option of the loss, and the default stays.
            batch_parameters.append(parameter.name)
    names_tensors = bool(by_position or by_parameter or batch_parameters)
    # With **kwargs alone the loss gets everything; beside names of its own, **kwargs are the caller's further options.
    if takes_any_name and not names_tensors:
        by_parameter = {**{name: name for name in ARGUMENTS}, **ALIASES}
    return _Taken(by_position=by_position, by_parameter=by_parameter, batch_parameters=batch_parameters)


@contextlib.contextmanager
def _errors_of_the_loss() -> Iterator[None]:
    """Turn whatever the loss raises into a :class:`UserError` of one line."""
    try:
        yield
    except UserError:
        # Ours already says what is wrong, as a key that the batch does not have.
        raise
    except (Exception, SystemExit) as error:
        # A loss that ends the process with exit code 0 would pass for a loss that is right.
        hint = ""
        if "bool tensor" in str(error):
            hint = " (the mask is a bool tensor; wrap the loss and give it mask.to(logp.dtype))"
        raise UserError(f"loss_fn: it raised {described_error(error)}{hint}") from error


def described_error(error: BaseException) -> str:
    """The kind and the first line of an exception's message, for a message of one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0]}"


def _signature(loss_fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function, or of a module's ``forward``.

    Raises :class:`UserError` for a class, and where the parameters cannot be read (some functions written in C).
    """
    if isinstance(loss_fn, type):
        raise UserError(f"loss_fn: {loss_fn.__name__} is a class; give an instance of it")
    if inspect.iscoroutinefunction(loss_fn):
        raise UserError("loss_fn: it is an async function; give one that returns the loss itself")
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
    known_names = {*ARGUMENTS, *ALIASES, *BATCHES}
    takes_args = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters)
    # Beside names of tensors, *args are further options, and stay empty.
    if takes_args and not any(parameter.name in known_names for parameter in parameters):
        raise UserError(f"loss_fn: it takes *args; wrap it in a function with parameters among {', '.join(ARGUMENTS)}")
    for parameter in parameters:
        is_known = parameter.name in known_names
        takes_many = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        has_default = parameter.default is not parameter.empty
        if not is_known and not takes_many and not has_default:
            raise _unknown_parameter(parameter.name)
    return parameters


def _unknown_parameter(name: str) -> UserError:
    if name in ("self", "cls"):
        return UserError(f"loss_fn.{name}: it is a method of a class; give that of an instance (Class().method)")
    hint = ""
    suggestion = nearest(name, (*ARGUMENTS, *ALIASES))
    if suggestion is not None:
        hint = f"; did you mean {suggestion!r}?"
    return UserError(
        f"loss_fn.{name}: no tensor has this name; allowed: {', '.join(ARGUMENTS)}{hint} (for other names: "
        "kl_comedy.conformance.adapt, --arguments; for an option of the loss: functools.partial, --options)"
    )
