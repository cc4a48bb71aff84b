"""The models of a run: the policy, its value head, and the references that KL is measured against.

Loading happens once the processes of the run are connected, because a policy may be split over them. All ranks call
these functions, and where loading fails on one rank, the error is raised on all: a rank that waits in an exchange for
one that has failed would wait for :data:`kl_comedy.training.distributed.TIMEOUT`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kl_comedy.config import Config
from kl_comedy.config.combinations import versions_of_samples
from kl_comedy.config.schema import ModelConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import KLTerm
from kl_comedy.models import LoadedModel, load_model
from kl_comedy.models.load import load_tokenizer, pick_device
from kl_comedy.models.reference import (
    PastPolicies,
    Reference,
    build_reference,
    check_past_policies,
    check_tokens,
    match_teacher,
)
from kl_comedy.training.distributed import Ranks
from kl_comedy.training.loss import uses_critic
from kl_comedy.training.packing import pass_options


class ValueHead(nn.Module):
    """PPO's value ``V = w . hidden + b`` in float32, zero at the start: the first advantages are the returns to go."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_NH: Tensor, mask_BT: Tensor) -> Tensor:
        """The value of the prefix before each completion token, ``[B, T]``, zero outside the mask."""
        # Values are regressed to returns: bfloat16 has too few digits for the differences between them.
        with torch.autocast(device_type=hidden_NH.device.type, enabled=False):
            value_N = self.linear(hidden_NH.float())[:, 0]
        zeros_BT = torch.zeros(mask_BT.shape, dtype=value_N.dtype, device=value_N.device)
        return zeros_BT.masked_scatter(mask_BT, value_N)


@dataclass(frozen=True, kw_only=True)
class RunModels:
    """The policy, its value head (None without a critic), and the references by name."""

    policy: LoadedModel
    value_head: ValueHead | None
    references: dict[str, Reference | PastPolicies]


def load_models(config: Config, terms: Iterable[KLTerm], ranks: Ranks) -> RunModels:
    """Load whatever the run passes tokens through. Raises :class:`UserError` on all ranks."""
    terms = list(terms)
    policy = load_policy(config, ranks)
    value_head = None
    if uses_critic(config.algorithm):
        # A multimodal model keeps the width of its language model in a part of its config.
        model_config: Any = policy.model.config
        value_head = ValueHead(int(model_config.get_text_config().hidden_size), policy.device)
    # The initial reference is always there, because KL is reported against it; others where a term names them.
    named = {term.reference for term in terms} - {"initial", "sampler"}
    if any(term.reads_past_policy for term in terms):
        named.add("sampler")
    references: dict[str, Reference | PastPolicies] = {}
    for name in ["initial", *sorted(named)]:
        if name == "teacher":
            references[name] = _teacher_reference(config, policy, terms, ranks)
        elif name == "sampler":
            references[name] = past_policies(config, policy)
        else:
            references[name] = build_reference(name, policy, config)
    return RunModels(policy=policy, value_head=value_head, references=references)


def past_policies(config: Config, policy: LoadedModel) -> PastPolicies:
    """Room for the versions that samples may be of. Raises :class:`UserError` where they are too large."""
    trained_bytes = sum(p.numel() * p.element_size() for p in policy.model.parameters() if p.requires_grad)
    check_past_policies(config, trained_bytes)
    return PastPolicies(policy.model, pass_options(config, policy), versions=versions_of_samples(config))


def load_policy(config: Config, ranks: Ranks) -> LoadedModel:
    """The policy: whole in every process, or in shards.

    Raises :class:`UserError` on all ranks, also where some of them see a GPU and others do not.
    """
    # Checked before loading: a policy on CPU and GPU would wait for ever in its first exchange.
    device_types = ranks.gather(pick_device(config.model.device).type)
    if len(set(device_types)) > 1:
        without_gpu = [str(rank) for rank, device_type in enumerate(device_types) if device_type == "cpu"]
        reason = f"torch sees no GPU on rank {', '.join(without_gpu)}"
        raise bad_value("model.device", config.model.device, "cpu", reason)
    return _load(config.model, config, ranks)


def _teacher_reference(config: Config, policy: LoadedModel, terms: list[KLTerm], ranks: Ranks) -> Reference:
    assert config.reference.teacher is not None
    if config.reference.teacher.url is not None:
        reference: Reference = connect_teacher(config, policy, terms, ranks)
        return reference
    return build_reference("teacher", policy, config, teacher=load_teacher(config, policy, ranks))


def load_teacher(config: Config, policy: LoadedModel, ranks: Ranks) -> LoadedModel:
    """The model of ``reference.teacher``, whole in every process or in shards as the policy is; it never trains.

    Raises :class:`UserError` on all ranks where it cannot be loaded, or where its tokens are not the policy's.
    """
    settings = config.reference.teacher
    assert settings is not None
    with teacher_errors():
        loaded = _load(settings.model(config.model), config, ranks)
        adapter = settings.adapter
        model = ranks.raise_on_all_ranks(lambda: match_teacher(loaded, policy, adapter))
    return replace(loaded, model=model)


def connect_teacher(config: Config, policy: LoadedModel, terms: Iterable[KLTerm], ranks: Ranks) -> Any:
    """The teacher behind ``reference.teacher.url``; every process asks it about its own rows.

    Raises :class:`UserError` on all ranks where the server does not answer, or its tokens are not the policy's.
    """
    from kl_comedy.rollouts.engines.teacher import TeacherServer

    settings = config.reference.teacher
    assert settings is not None
    # One request serves all terms, so it asks for the most top tokens that any of them reads.
    top_tokens = 0
    for term in terms:
        if term.reference == "teacher" and term.top is not None:
            top_tokens = max(top_tokens, term.top.k)

    def connect() -> Any:
        # Only tokenizers are compared, so that the policy's model can stand for the one behind the server.
        tokenizer = load_tokenizer(settings.model(config.model))
        check_tokens(replace(policy, tokenizer=tokenizer), policy, "model.source", settings.source)
        return TeacherServer(settings, policy, top_tokens, ranks.raise_on_all_ranks)

    with teacher_errors():
        return ranks.raise_on_all_ranks(connect)


@contextlib.contextmanager
def teacher_errors() -> Iterator[None]:
    """Inside, messages about ``model.*`` become messages about ``reference.teacher.*``, where the user set it."""
    try:
        yield
    except UserError as error:
        raise UserError(re.sub(r"^model\.", "reference.teacher.", str(error))) from error


def _load(model: ModelConfig, config: Config, ranks: Ranks) -> LoadedModel:
    if not ranks.sharded:
        return ranks.raise_on_all_ranks(lambda: load_model(model))
    from kl_comedy.models.sharding import load_sharded

    train = config.train
    # Shards within a node need no network in each pass, at the price of a copy per node.
    copies = train.nodes if train.shards == "node" else 1
    return load_sharded(
        model,
        limit_bytes=int(config.train.replica_gib * 2**30),
        copies=copies,
        bf16=train.precision == "bf16" and model.dtype == "float32",
    )
