"""A policy sharded by FSDP2: built on the meta device, then filled tensor by tensor from rank 0.

    config -> skeleton (no memory) -> fully_shard per decoder layer -> empty shards -> weights from rank 0

Rank 0 reads one tensor at a time; the others receive their shard of it. Where the weights are not safetensors under
the model's own names (a conversion on loading), rank 0 loads the whole model into host memory, up to a limit. The root
FSDP unit contains embedding, final norm and head, so tied weights stay tied.

Under ``train.precision=bf16`` the matrices of the decoder layers are gathered as bfloat16, at half the traffic.
Autocast would round the gathered weights in the same way, so the numbers are those of float32 gathers. A unit has one
dtype: the norms of the layers are parts of the root, which is gathered in float32. Gradients are summed over the ranks
in float32.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from kl_comedy.models.sources import check_undamaged, first_line, from_pretrained, loading_arguments, source_folder
from kl_comedy.models.types import LoadedModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from kl_comedy.config.schema import ModelConfig

ReadWeight = Callable[[str], Tensor]
"""Reads one weight by its name in the causal LM; called on rank 0 only."""


def load_sharded(config: ModelConfig, *, limit_bytes: int, copies: int = 1, bf16: bool = False) -> LoadedModel:
    """Load the policy of ``config`` over all processes of the default process group, which must exist.

    ``limit_bytes`` bounds a model that rank 0 has to load whole. ``copies`` of the policy are each sharded over equally
    many consecutive ranks (HSDP). ``bf16``: see the module. Raises :class:`UserError` on every process alike.
    """
    config = whole_model(config)
    device = pick_device(config.device)
    check_kernels(config, device)
    axes: dict[str, int] = {}
    # Of a mesh with two axes fully_shard makes HSDP: it copies over the first and shards over the second.
    if copies > 1:
        axes["copies"] = copies
    axes["shards"] = dist.get_world_size() // copies
    mesh = dist.device_mesh.init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    tokenizer = load_tokenizer(config)
    model = _sharded_skeleton(config, mesh, device, bf16)
    _fill_weights(model, _weight_reader_on_rank_zero(config, model, limit_bytes))
    model.train(config.gradient_checkpointing)
    check_log_probs(model, share_prompt=config.share_prompt)
    return LoadedModel(model=model, tokenizer=tokenizer, device=device, source=config.source)


def skeleton(config: ModelConfig) -> Any:
    """The causal LM with parameters on the meta device, and with real buffers."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    # Rotary frequencies are buffers that no state dict has, so they could not be filled later.
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
    if config.lora is None:
        return model
    return add_lora(model, config.lora)


def clone_sharded(model: nn.Module) -> nn.Module:
    """A copy of a sharded model in its own memory. All processes must call it. FSDP2 models cannot be deep-copied."""
    clone: nn.Module = vars(model)["_kl_comedy_build_empty"]()
    with torch.no_grad():
        for target, source in zip(_local_tensors(clone), _local_tensors(model), strict=True):
            target.copy_(source)
    return clone


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The items of the body's first module list. Raises :class:`UserError` where it has none."""
    for module in decoder_body(model).modules():
        if isinstance(module, nn.ModuleList):
            return list(module)
    raise UserError(f"model.source: no decoder layers to shard in {type(unwrap(model)).__name__}")


def rounded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What autocast rounds to bfloat16 in decoder layers: parameters of linear layers and of modules with matrices."""
    rounded: list[nn.Parameter] = []
    for layer in decoder_layers(model):
        for module in layer.modules():
            parameters = list(module.parameters(recurse=False))
            has_matrix = any(parameter.dim() > 1 for parameter in parameters)
            if has_matrix or isinstance(module, nn.Linear):
                rounded += parameters
    return rounded


def compute_in_bf16(model: nn.Module, device: torch.device) -> None:
    """Let decoder layers compute under autocast wherever they are called.

    Their weights are gathered in bfloat16, and inputs in float32 would not fit them outside of autocast.
    """
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
    policy = MixedPrecisionPolicy()
    layers = decoder_layers(model)
    of_layers: set[nn.Parameter] = set()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        of_layers.update(rounded_parameters(model))
        compute_in_bf16(model, device)
    else:
        for layer in layers:
            of_layers.update(layer.parameters())
    # The root before the layers: of a layer that is a unit already it would not take the norms.
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=of_layers)
    for layer in layers:
        of_root = set(layer.parameters()) - of_layers
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=of_root)
    _allocate(model, device)
    if unwrap(model).config.tie_word_embeddings:
        unwrap(model).tie_weights()  # on the meta device tied weights are built apart
    # How clone_sharded gets a model of the same layout.
    model._kl_comedy_build_empty = lambda: _sharded_skeleton(config, mesh, device, bf16)
    return model


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Give meta tensors memory on ``device`` and move the others there. ``to_empty`` would lose the buffers."""

    def allocate(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=device)
        return tensor.to(device)

    module: Any = model
    module._apply(allocate)


def _build_architecture(config: ModelConfig) -> Any:
    """The causal LM of ``config`` with freshly initialized weights; inside :func:`skeleton` these take no memory."""
    if config.source == "pocket":
        from kl_comedy.models.pocket import build_model, recipe_from_options

        return build_model(recipe_from_options(config.options), attention=config.library_attention)
    if config.gguf_file is not None:
        why = "a GGUF file cannot be streamed; save it as a Hugging Face folder first"
        raise bad_value("model.gguf_file", config.gguf_file, "null with train.strategy: fsdp", why)
    import transformers

    # transformers types what it takes more narrowly than it takes it.
    auto_model: Any = transformers.AutoModelForCausalLM
    auto_generation: Any = transformers.GenerationConfig

    config = whole_model(config)
    # A copy, because the model's config keeps nested options as its own.
    options = copy.deepcopy(loading_arguments(config))
    model_config = from_pretrained(transformers.AutoConfig, config.source, "model.source", **options)
    try:
        model = auto_model.from_config(
            model_config,
            attn_implementation=config.library_attention,
            trust_remote_code=config.trust_remote_code,
        )
    except Exception as error:  # architectures do not check their configs, and raise errors of many types
        raise UserError(f"model.source: {config.source!r} cannot be loaded: {first_line(error)}") from error
    with contextlib.suppress(OSError):  # a model without generation_config.json keeps the one of its config
        model.generation_config = auto_generation.from_pretrained(config.source, revision=config.revision)
    return model


def _local_tensors(model: nn.Module) -> list[Tensor]:
    """This process's shards of the parameters, and the buffers."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    local_tensors = []
    for tensor in tensors:
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        local_tensors.append(tensor)
    return local_tensors


@torch.no_grad()
def _fill_weights(model: nn.Module, read: ReadWeight | None) -> None:
    """Distribute every weight from rank 0 (which alone has ``read``), the adapter's initial values included.

    All processes must call it, with the same model: each weight is a collective.
    """
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in model.named_parameters():
        shard: Any = parameter
        local = shard.to_local()
        shape = tuple(shard.shape)
        # distribute_tensor sends rank 0's values; what the others have in theirs is not read.
        full = torch.empty(shape, dtype=shard.dtype, device=local.device)
        if read is not None:
            if is_lora_factor(name):
                full.copy_(initial_factor(name, shape))
            else:
                full.copy_(read(base_name(name)))
        local.copy_(distribute_tensor(full, shard.device_mesh, shard.placements).to_local())
    # Buffers of the state dict; the others were computed when the model was built.
    causal = unwrap(model)
    saved_names = set(causal.state_dict())
    for name, buffer in causal.named_buffers():
        if name in saved_names:
            if read is not None:
                buffer.copy_(read(name))
            dist.broadcast(buffer, src=0)


def _weight_reader_on_rank_zero(config: ModelConfig, model: nn.Module, limit_bytes: int) -> ReadWeight | None:
    """The reader on rank 0, None elsewhere. A :class:`UserError` of rank 0 is raised on every process.

    Raised on rank 0 alone, it would leave the others in their next collective, waiting for a process that has ended.
    """
    reader = None
    message = [""]
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
    """A reader of the safetensors files where they have the model's own names, else of a model that is loaded whole.

    Raises :class:`UserError` for damaged files, and for a model above ``limit_bytes`` that would be loaded whole.
    """
    if config.source == "pocket":
        from kl_comedy.models.pocket import pocket_folder, recipe_from_options

        folder = pocket_folder(recipe_from_options(config.options))
    else:
        folder = source_folder(config, ["*.safetensors", "*.json"])
    check_undamaged(config)
    shapes = {}
    for name, weight in model.named_parameters():
        if not is_lora_factor(name):
            shapes[base_name(name)] = tuple(weight.shape)
    files = _files_of_weights(folder, shapes)
    if shapes.keys() <= files.keys():
        return lambda name: _read_weight(files[name], name)

    size = sum(parameter.numel() * parameter.element_size() for parameter in unwrap(model).parameters())
    if size > limit_bytes:
        raise UserError(
            f"model.source: {config.source!r} is not safetensors under the model's own names, so rank 0 would load it "
            f"whole: {size / 2**30:.1f} GiB, over train.replica_gib ({limit_bytes / 2**30:g}); save "
            "it once as a Hugging Face folder, or raise train.replica_gib"
        )
    state: dict[str, Tensor] = load_base(replace(config, lora=None)).state_dict()
    return lambda name: state[name]


def _files_of_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Path]:
    """The safetensors file of each weight in ``folder``.

    Raises :class:`UserError` for a file that cannot be read, and for weights of another shape than in ``shapes``.
    """
    from safetensors import SafetensorError, safe_open

    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                # Reads the header alone. The file is no dict: it has keys(), and no iterator.
                stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"model.source: {path} cannot be read: {first_line(error)}") from error
        for name, shape in stored.items():
            if name in shapes and shape != shapes[name]:
                raise UserError(f"model.source: {path}: {name} has shape {shape}, and the model {shapes[name]}")
            files[name] = path
    return files


def _read_weight(path: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        weight: Tensor = file.get_tensor(name)
        return weight
