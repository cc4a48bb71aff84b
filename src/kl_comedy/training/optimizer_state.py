"""An optimizer's state as named tensors, whatever way its parameters lie over the processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kl_comedy.models.slices import held, is_slice, local, named_parameters
from kl_comedy.training.world import World

States = list[dict[Any, dict[str, Any]]]
"""For each optimizer, by parameter, the state's tensors as they are held."""


def kept_states(module: nn.Module, optimizers: Sequence[Any], world: World) -> States:
    """What the optimizers keep now. Where slices are held all processes must call: one that holds no element of a
    weight has no state for it, and takes part in writing it all the same."""
    found: States = []
    for optimizer in optimizers:
        own = {
            name: {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
            for name, parameter in named_parameters(module)
            if parameter in optimizer.state
        }
        parameters = dict(named_parameters(module))
        if any(is_slice(parameter) for parameter in parameters.values()):
            _add_missing(own, parameters, world)
        found.append(
            {
                parameters[name]: {key: _laid_out(parameters[name], value) for key, value in state.items()}
                for name, state in own.items()
            }
        )
    return found


def _add_missing(own: dict[str, dict[str, Tensor]], parameters: Mapping[str, nn.Parameter], world: World) -> None:
    """The keys that other ranks have for a weight: numbers as theirs are, tensors with no element here."""
    told = world.gather(
        {name: {k: float(v) if v.ndim == 0 else None for k, v in state.items()} for name, state in own.items()}
    )
    everywhere = {name: state for found in told for name, state in found.items()}
    for name in parameters:
        for key, number in everywhere.get(name, {}).items():
            parameter = parameters[name]
            absent = parameter.new_empty(0) if number is None else torch.tensor(number, device=parameter.device)
            own.setdefault(name, {}).setdefault(key, absent)


def blank_states(module: nn.Module, optimizers: Sequence[Any], known: Mapping[str, Any]) -> States:
    """For each parameter the tensors that a checkpoint has for it, zero, laid out as the parameter is.

    ``known``: what the checkpoint says of each of its tensors, by name.
    """
    found: States = []
    for number, optimizer in enumerate(optimizers):
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        states: dict[Any, dict[str, Any]] = {}
        for name, parameter in named_parameters(module):
            if parameter in mine:
                start = f"optimizer.{number}.{name}."
                keys = [key for key in known if key.startswith(start) and "." not in key.removeprefix(start)]
                tensors = {key.removeprefix(start): _blank(parameter, known[key]) for key in keys}
                if tensors:
                    states[parameter] = tensors
        found.append(states)
    return found


def _blank(parameter: Tensor, facts: Any) -> Any:
    if facts.size == held(parameter).shape:
        return _laid_out(parameter, torch.zeros_like(parameter, dtype=facts.properties.dtype, requires_grad=False))
    return torch.zeros(facts.size, dtype=facts.properties.dtype)


def _laid_out(parameter: Tensor, value: Tensor) -> Any:
    """A state's tensor as its parameter lies; a count is whole everywhere."""
    return held(parameter, value) if value.ndim else value


def flat(states: States, module: nn.Module) -> dict[str, Any]:
    """``optimizer.<number>.<parameter>.<key>`` to tensor, in the order of the parameters, alike on all processes."""
    return {
        f"optimizer.{number}.{name}.{key}": value
        for number, state in enumerate(states)
        for name, parameter in named_parameters(module)
        if parameter in state
        for key, value in sorted(state[parameter].items())
    }


def give_back(optimizer: Any, state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Let ``optimizer`` go on with ``state``."""
    for parameter, tensors in state.items():
        optimizer.state[parameter] = {key: local(value) for key, value in tensors.items()}
