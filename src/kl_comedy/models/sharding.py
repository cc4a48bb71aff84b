"""A policy sharded by FSDP2: built on the meta device, then filled tensor by tensor from rank 0.

    config -> skeleton (no memory) -> fully_shard per decoder layer -> empty shards -> weights from rank 0

Rank 0 reads one tensor at a time; the others receive their shard of it. Where the weights are not safetensors under
the model's own names (GGUF, a conversion on loading), rank 0 loads the whole model into host memory, up to a limit.
The root FSDP unit contains embedding, final norm and head, so tied weights stay tied.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kl_comedy.errors import UserError, bad_value
from kl_comedy.models.introspection import decoder_body, disable_dropout, refuse_scaled_logits, unwrap
from kl_comedy.models.load import DTYPES, LoadedModel, check_log_probs, load_base, load_tokenizer, pick_device
from kl_comedy.models.lora import add_lora, base_name, initial_factor, is_lora_factor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from kl_comedy.config.schema import ModelConfig

ReadWeight = Callable[[str], Tensor]
"""Reads one weight by its name in the causal LM; called on rank 0 only."""


def load_sharded(config: ModelConfig, *, limit_bytes: int) -> LoadedModel:
    """Load the policy of ``config`` over all processes of the default process group, which must exist.

    ``limit_bytes`` bounds a model that rank 0 has to load whole. Raises :class:`UserError` on every process alike.
    """
    device = pick_device(config.device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    tokenizer = load_tokenizer(config)
    model = _sharded_skeleton(config, mesh, device)
    _fill_weights(model, _open_on_rank_zero(lambda: _weight_reader(config, model, limit_bytes)))
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
    return model.eval()


def unsharded_skeleton(config: ModelConfig) -> Any:
    """The policy's architecture, adapter included, with uninitialized weights on the CPU."""
    model = skeleton(config)
    _allocate(model, torch.device("cpu"))
    model.tie_weights()
    return model if config.lora is None else add_lora(model, config.lora)


def clone_sharded(model: nn.Module) -> nn.Module:
    """A copy of a sharded model in its own memory; all processes must call. (FSDP2 models cannot be deep-copied.)"""
    clone: nn.Module = vars(model)[_BUILD_EMPTY]()
    with torch.no_grad():
        for target, source in zip(_local_tensors(clone), _local_tensors(model), strict=True):
            target.copy_(source)
    return clone


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers says must not be split; else the items of the body's longest module list."""
    names = set(getattr(unwrap(model), "_no_split_modules", None) or ())  # transformers has no public accessor
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if layers:
        return layers
    lists = [module for module in decoder_body(model).modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UserError(f"model.source: no decoder layers to shard in {type(unwrap(model)).__name__}")
    return list(max(lists, key=len))


_BUILD_EMPTY = "_kl_comedy_build_empty"
"""Attribute of a sharded model: a function that builds another one, sharded alike and without weights."""


def _sharded_skeleton(config: ModelConfig, mesh: DeviceMesh, device: torch.device) -> Any:
    """The policy of ``config``, sharded, shards allocated but not filled; buffers are final."""
    from torch.distributed.fsdp import fully_shard

    model = skeleton(config)
    if config.lora is not None:
        model = add_lora(model, config.lora)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for unit in (*decoder_layers(model), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    _allocate(model, device)
    if getattr(unwrap(model).config, "tie_word_embeddings", False):
        unwrap(model).tie_weights()  # on the meta device tied weights are built apart
    setattr(model, _BUILD_EMPTY, lambda: _sharded_skeleton(config, mesh, device))
    return model


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Give meta tensors memory on ``device`` and move the others there (``to_empty`` would lose the buffers)."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))


def _build_architecture(config: ModelConfig) -> Any:
    if config.source == "pocket":
        from kl_comedy.models.pocket import build_model, recipe_from_options

        return build_model(recipe_from_options(config.options), attention=config.attention)
    if config.gguf_file is not None:
        raise bad_value(
            "model.gguf_file",
            config.gguf_file,
            "null with train.strategy: fsdp",
            "a GGUF file cannot be streamed; save it as a Hugging Face folder first",
        )
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        model_config = AutoConfig.from_pretrained(config.source, **options, **copy.deepcopy(config.options))
        model = AutoModelForCausalLM.from_config(
            model_config, attn_implementation=config.attention, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(f"model.source: {config.source!r} cannot be loaded: {str(error).splitlines()[0]}") from error
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
    rank_zero = dist.get_rank() == 0
    for name, parameter in model.named_parameters():
        value = None
        if is_lora_factor(name):
            value = initial_factor(name, tuple(parameter.shape)) if rank_zero else None
        elif read is not None:
            value = read(base_name(name))
        _scatter(parameter, value)
    causal = unwrap(model)
    saved_names = set(causal.state_dict())
    for name, buffer in causal.named_buffers():
        if name in saved_names:
            if read is not None:
                buffer.copy_(read(name))
            dist.broadcast(buffer, src=0)


def _scatter(parameter: Any, value: Tensor | None) -> None:
    """Give each process its shard of ``value`` (rank 0's; None elsewhere)."""
    from torch.distributed.tensor import distribute_tensor

    local = parameter.to_local()
    if value is None:
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
    else:
        full = value.to(dtype=parameter.dtype, device=local.device)
    local.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements).to_local())


def _open_on_rank_zero(open_reader: Callable[[], ReadWeight]) -> ReadWeight | None:
    """The reader on rank 0, None elsewhere. A :class:`UserError` of rank 0 is raised on every process."""
    reader, message = None, [""]
    if dist.get_rank() == 0:
        try:
            reader = open_reader()
        except UserError as error:
            message = [str(error)]
    dist.broadcast_object_list(message, src=0)
    if message[0]:
        raise UserError(message[0])
    return reader


def _weight_reader(config: ModelConfig, model: nn.Module, limit_bytes: int) -> ReadWeight:
    """Reads safetensors files where they have the model's own names, else a model loaded whole."""
    from safetensors import safe_open

    names = {base_name(name) for name, _ in model.named_parameters() if not is_lora_factor(name)}
    files = _safetensors_files(_model_folder(config))

    def read(name: str) -> Tensor:
        with safe_open(files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    if names <= set(files):
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


def _safetensors_files(folder: Path) -> dict[str, Path]:
    """The safetensors file of every weight in ``folder``."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    return files


def _model_folder(config: ModelConfig) -> Path:
    if config.source == "pocket":
        from kl_comedy.models.pocket import pocket_folder, recipe_from_options

        return pocket_folder(recipe_from_options(config.options))
    if Path(config.source).is_dir():
        return Path(config.source)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json"]
    try:
        return Path(snapshot_download(config.source, revision=config.revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds of errors
        raise UserError(f"model.source: {config.source!r} cannot be had: {str(error).splitlines()[0]}") from error
