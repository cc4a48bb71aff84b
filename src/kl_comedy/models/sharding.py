"""A policy sharded by FSDP2: built on the meta device, then filled tensor by tensor from rank 0.

    config -> skeleton (no memory) -> fully_shard per decoder layer -> empty shards -> weights from rank 0

Rank 0 reads one tensor at a time; the others receive their shard of it. Where the weights are not safetensors under
the model's own names (GGUF, a conversion on loading), rank 0 loads the whole model into host memory, up to a limit.
The root FSDP unit contains embedding, final norm and head, so tied weights stay tied.

Under ``train.precision=bf16`` the matrices of the decoder layers are gathered as bfloat16, at half the traffic.
Autocast would round the gathered weights in the same way, so the numbers are those of float32 gathers. Norms, embedding
and head are gathered in float32, and gradients are summed over the ranks in float32.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kl_comedy.errors import UserError, bad_value
from kl_comedy.models.introspection import decoder_body, disable_dropout, refuse_scaled_logits, unwrap
from kl_comedy.models.load import (
    DTYPES,
    carry_options,
    check_kernels,
    check_log_probs,
    load_base,
    load_tokenizer,
    pick_device,
    use_fast_linears,
    whole_model,
)
from kl_comedy.models.lora import add_lora, base_name, initial_factor, is_lora_factor
from kl_comedy.models.sources import check_undamaged, first_line, from_pretrained, source_folder
from kl_comedy.models.types import LoadedModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from kl_comedy.config.schema import ModelConfig

ReadWeight = Callable[[str], Tensor]
"""Reads one weight by its name in the causal LM; called on rank 0 only."""


def load_sharded(config: ModelConfig, *, limit_bytes: int, copies: int = 1, bf16: bool = False) -> LoadedModel:
    """Load the policy of ``config`` over all processes of the default process group, which must exist.

    ``limit_bytes`` bounds a model that rank 0 has to load whole. ``copies``: of the policy, each sharded over as many
    consecutive ranks (HSDP). ``bf16``: see the module. Raises :class:`UserError` on every process alike.
    """
    config = whole_model(config)
    device = pick_device(config.device)
    check_kernels(config, device)
    sizes: dict[str, int] = {"copies": copies} if copies > 1 else {}
    sizes["shards"] = dist.get_world_size() // copies
    mesh = dist.device_mesh.init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    tokenizer = load_tokenizer(config)
    model = _sharded_skeleton(config, mesh, device, bf16)
    _fill_weights(model, _weight_reader_on_rank_zero(config, model, limit_bytes))
    model.train(config.gradient_checkpointing)
    check_log_probs(model, share_prompt=config.share_prompt)
    return LoadedModel(model=model, tokenizer=tokenizer, device=device, source=config.source)


def skeleton(config: ModelConfig) -> Any:
    """The causal LM with parameters on the meta device, and real buffers: rotary frequencies are in no state dict."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = _build_architecture(config).to(DTYPES[config.dtype])
    refuse_scaled_logits(model.config)
    disable_dropout(model)
    carry_options(model, config)
    return model.eval()


def unsharded_skeleton(config: ModelConfig) -> Any:
    """The policy's architecture, adapter included, with uninitialized weights on the CPU."""
    model = skeleton(config)
    _allocate(model, torch.device("cpu"))
    model.tie_weights()
    return model if config.lora is None else add_lora(model, config.lora)


def clone_sharded(model: nn.Module) -> nn.Module:
    """A copy of a sharded model in its own memory; all processes must call. (FSDP2 models cannot be deep-copied.)"""
    clone: nn.Module = vars(model)["_kl_comedy_build_empty"]()
    with torch.no_grad():
        for target, source in zip(_local_tensors(clone), _local_tensors(model), strict=True):
            target.copy_(source)
    return clone


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The items of the body's first module list. Raises :class:`UserError` where it has none."""
    modules = decoder_body(model).modules()
    layers = next((module for module in modules if isinstance(module, nn.ModuleList)), None)
    if layers is None:
        raise UserError(f"model.source: no decoder layers to shard in {type(unwrap(model)).__name__}")
    return list(layers)


def rounded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What autocast rounds to bfloat16 in decoder layers: parameters of linear layers and of modules with matrices."""
    rounded: list[nn.Parameter] = []
    for module in chain.from_iterable(layer.modules() for layer in decoder_layers(model)):
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.Linear) or any(parameter.dim() > 1 for parameter in own):
            rounded += own
    return rounded


def compute_in_bf16(model: nn.Module, device: torch.device) -> None:
    """Let decoder layers compute under autocast wherever they are called: rounded weights fit nothing else."""
    layer: Any
    for layer in decoder_layers(model):
        layer.forward = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)(layer.forward)
    unwrap(model)._kl_comedy_layers_in_bf16 = True


def _sharded_skeleton(config: ModelConfig, mesh: DeviceMesh, device: torch.device, bf16: bool) -> Any:
    """The policy of ``config``, sharded, shards allocated but not filled; buffers are final."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = skeleton(config)
    if config.lora is not None:
        model = add_lora(model, config.lora)
    use_fast_linears(model, device)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy, layers = MixedPrecisionPolicy(), decoder_layers(model)
    if bf16:
        narrow: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        policy, rounded = MixedPrecisionPolicy(**narrow, cast_forward_inputs=False), set(rounded_parameters(model))
        for module in chain.from_iterable([list(layer.modules()) for layer in layers]):
            if not rounded.issuperset(module.parameters(recurse=False)):  # a norm: a unit of its own, in float32
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
        compute_in_bf16(model, device)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    _allocate(model, device)
    if unwrap(model).config.tie_word_embeddings:
        unwrap(model).tie_weights()  # on the meta device tied weights are built apart
    model._kl_comedy_build_empty = lambda: _sharded_skeleton(config, mesh, device, bf16)  # for clone_sharded
    return model


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Give meta tensors memory on ``device`` and move the others there (``to_empty`` would lose the buffers)."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))


def _build_architecture(config: ModelConfig) -> Any:
    if config.source == "pocket":
        from kl_comedy.models.pocket import build_model, recipe_from_options

        return build_model(recipe_from_options(config.options), attention=config.library_attention)
    if config.gguf_file is not None:
        why = "a GGUF file cannot be streamed; save it as a Hugging Face folder first"
        raise bad_value("model.gguf_file", config.gguf_file, "null with train.strategy: fsdp", why)
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = whole_model(config)
    trust: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    options = {**trust, "revision": config.revision, **copy.deepcopy(config.options)}
    model_config = from_pretrained(AutoConfig, config.source, "model.source", **options)
    try:
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation=config.library_attention, **trust)
    except Exception as error:  # a config that its architecture trips over
        raise UserError(f"model.source: {config.source!r} cannot be loaded: {first_line(error)}") from error
    with contextlib.suppress(OSError):  # a model without generation_config.json keeps the one of its config
        model.generation_config = GenerationConfig.from_pretrained(config.source, revision=config.revision)
    return model


def _local_tensors(model: nn.Module) -> list[Tensor]:
    """This process's shards of the parameters, and the buffers."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


@torch.no_grad()
def _fill_weights(model: nn.Module, read: ReadWeight | None) -> None:
    """Distribute every weight from rank 0 (which alone has ``read``), the adapter's initial values too."""
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in model.named_parameters():
        shard: Any = parameter
        local, shape = shard.to_local(), tuple(shard.shape)
        full = torch.empty(shape, dtype=shard.dtype, device=local.device)
        if read is not None:
            full.copy_(initial_factor(name, shape) if is_lora_factor(name) else read(base_name(name)))
        local.copy_(distribute_tensor(full, shard.device_mesh, shard.placements).to_local())
    causal = unwrap(model)
    saved_names = set(causal.state_dict())
    for name, buffer in causal.named_buffers():
        if name in saved_names:
            if read is not None:
                buffer.copy_(read(name))
            dist.broadcast(buffer, src=0)


def _weight_reader_on_rank_zero(config: ModelConfig, model: nn.Module, limit_bytes: int) -> ReadWeight | None:
    """The reader on rank 0, None elsewhere. A :class:`UserError` of rank 0 is raised on every process."""
    reader, message = None, [""]
    if dist.get_rank() == 0:
        try:
            reader = _weight_reader(config, model, limit_bytes)
        except UserError as error:
            message = [str(error)]
    dist.broadcast_object_list(message, src=0)
    if message[0]:
        raise UserError(message[0])
    return reader


def _weight_reader(config: ModelConfig, model: nn.Module, limit_bytes: int) -> ReadWeight:
    """Reads safetensors files where they have the model's own names, else a model loaded whole."""
    from safetensors import SafetensorError, safe_open

    if config.source == "pocket":
        from kl_comedy.models.pocket import pocket_folder, recipe_from_options

        folder = pocket_folder(recipe_from_options(config.options))
    else:
        folder = source_folder(config, ["*.safetensors", "*.json"])
    check_undamaged(config)
    weights = ((base_name(name), weight) for name, weight in model.named_parameters() if not is_lora_factor(name))
    shapes = {name: tuple(weight.shape) for name, weight in weights}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                there = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no dict
        except (SafetensorError, OSError) as error:
            raise UserError(f"model.source: {path} cannot be read: {first_line(error)}") from error
        for name in shapes.keys() & there.keys():
            if there[name] != shapes[name]:
                raise UserError(f"model.source: {path}: {name} has shape {there[name]}, and the model {shapes[name]}")
        files |= dict.fromkeys(there, path)

    def read(name: str) -> Tensor:
        with safe_open(files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    if shapes.keys() <= files.keys():
        return read
    size = sum(p.numel() * p.element_size() for p in unwrap(model).parameters())
    if size > limit_bytes:
        raise UserError(
            f"model.source: {config.source!r} is not safetensors under the model's own names, so rank 0 would load it "
            f"whole: {size / 2**30:.1f} GiB, over rollout.replica_gib ({limit_bytes / 2**30:g}); save it once as a "
            "Hugging Face folder, or raise rollout.replica_gib"
        )
    state = load_base(replace(config, lora=None)).state_dict()
    return lambda name: state[name]
