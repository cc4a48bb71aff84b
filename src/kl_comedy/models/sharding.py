"""A policy sharded by FSDP2 from the start: built on the meta device, its weights streamed in tensor by tensor.

    config -> skeleton (no memory) -> fully_shard per decoder layer -> own shards -> weights from rank 0

Rank 0 reads one tensor at a time; the others receive their shard of it. Where the weights are not safetensors under
the model's own names (GGUF, a conversion on loading), rank 0 holds the whole model in host memory for a moment; a
limit says how large that may be. The group's root holds embedding, final norm and head, so tied weights stay tied.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kl_comedy.errors import UserError, bad_value
from kl_comedy.models.introspection import (
    decoder_body,
    is_peft,
    refuse_scaled_logits,
    remember_twin,
    silence_dropout,
    unwrap,
)
from kl_comedy.models.load import (
    DTYPES,
    LoadedModel,
    add_lora,
    initial_adapter,
    load_base,
    load_tokenizer,
    pick_device,
    prepare_tokenizer,
    probe_head,
)
from kl_comedy.models.onednn_linear import adopt_products

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from kl_comedy.config.schema import ModelConfig

Source = Callable[[str], Tensor]
"""Reads one weight by its name in the causal LM; called on rank 0 only."""


def load_sharded(config: ModelConfig, *, limit_bytes: int) -> LoadedModel:
    """Load the policy of ``config`` over all processes of the default group, which must be there already.

    Raises :class:`UserError` for what the user can mend, on every process alike.
    """
    device = pick_device(config.device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    tokenizer = load_tokenizer(config)
    prepare_tokenizer(tokenizer)
    model = sharded_skeleton(config, mesh, device)
    _fill(model, from_rank_zero(lambda: weight_source(config, model, limit_bytes)))
    if config.lora is not None:
        _fill_adapter(model)
    model.train(config.gradient_checkpointing)
    probe_head(model, share_prompt=config.share_prompt)
    return LoadedModel(model=model, tokenizer=tokenizer, device=device, source=config.source)


def sharded_skeleton(config: ModelConfig, mesh: DeviceMesh, device: torch.device) -> Any:
    """The architecture of ``config``, sharded, its own shards allocated and not yet filled; buffers are final."""
    model = trained_skeleton(config)
    shard(model, mesh)
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    tie(model)
    remember_twin(model, lambda: sharded_skeleton(config, mesh, device))
    return model


def skeleton(config: ModelConfig) -> Any:
    """The causal LM with parameters on the meta device, and real buffers: rotary frequencies are in no state dict."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = _architecture(config).to(DTYPES[config.dtype])
    refuse_scaled_logits(model.config)
    silence_dropout(model)
    return model.eval()


def trained_skeleton(config: ModelConfig) -> Any:
    """The skeleton as it will be trained: with the adapter and the settings of ``config``."""
    model = skeleton(config)
    if config.lora is not None:
        model = add_lora(model, config.lora)
    adopt_products(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def tie(model: nn.Module) -> None:
    """Make weights one parameter that the architecture ties; on the meta device each is built on its own."""
    if getattr(unwrap(model).config, "tie_word_embeddings", False):
        unwrap(model).tie_weights()


def whole_skeleton(config: ModelConfig) -> Any:
    """The policy's architecture, adapter included, on the CPU: memory for every weight, and none of the values."""
    model = skeleton(config)
    model._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
    model.tie_weights()
    return model if config.lora is None else add_lora(model, config.lora)


def _architecture(config: ModelConfig) -> Any:
    if config.source == "pocket":
        from kl_comedy.models.pocket import build_model, recipe_from_options

        with torch.random.fork_rng(devices=[]):
            return build_model(recipe_from_options(config.options), attention=config.attention)
    if config.gguf_file is not None:
        raise bad_value(
            "model.gguf_file",
            config.gguf_file,
            "null with train.strategy: fsdp",
            "a GGUF file cannot be streamed; save it as a Hugging Face folder first",
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        found = AutoConfig.from_pretrained(
            config.source,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            **copy.deepcopy(config.options),
        )
        return AutoModelForCausalLM.from_config(
            found, attn_implementation=config.attention, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(f"model.source: {config.source!r} cannot be loaded: {str(error).splitlines()[0]}") from error


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every decoder layer as a unit, and what is left (embedding, norm, head) with the root."""
    from torch.distributed.fsdp import fully_shard

    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers says must not be split; else the items of the body's longest module list."""
    named = set(getattr(unwrap(model), "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in named]
    if found:
        return found
    lists = [module for module in decoder_body(model).modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UserError(f"model.source: no decoder layers to shard in {type(unwrap(model)).__name__}")
    return list(max(lists, key=len))


@torch.no_grad()
def _fill(model: nn.Module, source: Source | None) -> None:
    """Distribute every base weight from rank 0, which alone has a ``source``."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            _scatter(parameter, None if source is None else source(base_name(name)))
    causal = unwrap(model)
    kept = set(causal.state_dict())
    for name, buffer in causal.named_buffers():
        if name in kept:
            if source is not None:
                buffer.copy_(source(name))
            dist.broadcast(buffer, src=0)


@torch.no_grad()
def _fill_adapter(model: nn.Module) -> None:
    rank_zero = dist.get_rank() == 0
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            _scatter(parameter, initial_adapter(name, tuple(parameter.shape)) if rank_zero else None)


def _scatter(parameter: Any, value: Tensor | None) -> None:
    """Give each process its shard of ``value`` (rank 0's; None elsewhere)."""
    from torch.distributed.tensor import distribute_tensor

    local = parameter.to_local()
    if value is None:
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
    else:
        full = value.to(dtype=parameter.dtype, device=local.device)
    local.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements).to_local())


def base_name(name: str) -> str:
    """The name a weight had before an adapter was put around it.

    >>> base_name("base_model.model.model.layers.0.q_proj.base_layer.weight")
    'model.layers.0.q_proj.weight'
    """
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def from_rank_zero(open_source: Callable[[], Source]) -> Source | None:
    """Open the source on rank 0; a mistake found there is raised everywhere, so that nobody waits."""
    found, told = None, [None]
    if dist.get_rank() == 0:
        try:
            found = open_source()
        except UserError as error:
            told = [str(error)]  # type: ignore[list-item]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise UserError(told[0])
    return found


def weight_source(config: ModelConfig, model: nn.Module, limit_bytes: int) -> Source:
    """Weights from safetensors files where they go by the model's names, else from a model loaded whole."""
    causal = unwrap(model)
    adapted = is_peft(model)
    wanted = {base_name(name) if adapted else name for name, _ in model.named_parameters() if ".lora_" not in name}
    files = dict(_weight_files(config))
    if wanted <= set(files):
        return lambda name: _read(files[name], name)
    size = sum(p.numel() * p.element_size() for p in causal.parameters())
    if size > limit_bytes:
        raise UserError(
            f"model.source: {config.source!r} is not safetensors under the model's own names, so rank 0 would load it "
            f"whole: {size / 2**30:.1f} GiB, over rollout.replica_gib ({limit_bytes / 2**30:g}); save it once as a "
            "Hugging Face folder, or raise rollout.replica_gib"
        )
    state = load_base(replace(config, lora=None)).state_dict()
    return lambda name: state[name]


def _weight_files(config: ModelConfig) -> Iterator[tuple[str, Path]]:
    """Every weight in the source's safetensors files."""
    from safetensors import safe_open

    folder = _folder(config)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
        yield from ((name, folder / file) for name, file in names.items())
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            yield from ((name, file) for name in opened.keys())  # noqa: SIM118 (not a mapping)


def _folder(config: ModelConfig) -> Path:
    if config.source == "pocket":
        from kl_comedy.models.pocket import pocket_folder, recipe_from_options

        return pocket_folder(recipe_from_options(config.options))
    if Path(config.source).is_dir():
        return Path(config.source)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(config.source, revision=config.revision, allow_patterns=["*.safetensors", "*.json"])
        )
    except Exception as error:  # the hub client raises many kinds; each means that the files cannot be had
        raise UserError(f"model.source: {config.source!r} cannot be had: {str(error).splitlines()[0]}") from error


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor
