"""A dispatch mode over fake tensors that counts what one rank of a GPU run does.

FakeTensor has shapes, dtypes and devices. :class:`Trace` adds the values of integers, booleans and small floats, so
that masks, sizes and ids decide as they do in a run, and counts: bytes on the device, collectives, what makes the host
wait, floating point operations, and products of mixed dtypes.
"""

import collections
import contextlib
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers c10d's operations for fake tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

ALLOCATION_BYTES = 512
"""torch's allocator rounds up to a multiple of it."""
KNOWN_FLOATS = 4096
"""Floats are followed up to this number of elements: rewards and advantages, not activations."""
KNOWN_ELEMENTS = 2**22
ONE_DTYPE = {"mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_efficient_attention", "_varlen_attn"}
"""Operations whose kernels refuse operands of different dtypes; on fake tensors nothing checks it."""
NOT_DETERMINISTIC = {"cumsum", "cumsum_", "cumprod", "histc", "kthvalue", "median", "put_", "scatter_reduce"}
"""Operations on floats that torch refuses on a GPU under deterministic algorithms."""
DATA_DEPENDENT = {"nonzero", "masked_select", "_unique2", "unique_dim", "repeat_interleave", "bincount"}
"""Operations whose result has a size that depends on values: on a GPU the host waits for it."""
ANSWERS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "is_pinned", "record_stream"}
"""Operations that return no tensor."""
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
PLAIN_TENSORS = (torch.Tensor, FakeTensor, torch.nn.Parameter, torch.nn.Buffer)


class _FakeTensors(FakeTensorMode):
    # There is no device that could be initialized.
    avoid_device_init = property(lambda self: True)


class Trace(TorchDispatchMode):
    """What ran on the device since the last :meth:`restart`."""

    def __init__(self) -> None:
        super().__init__()
        self._values = {}
        self._bytes_of = {}
        self._ignores = 0
        self.bytes = 0
        self.restart()

    def restart(self) -> None:
        """Begin counting anew; what is allocated stays so."""
        self.peak_bytes = self.bytes
        self.collectives = []
        self.waits = collections.Counter()
        self.flop = collections.Counter()
        self.violations = collections.Counter()

    @contextlib.contextmanager
    def ignored(self):
        """Inside, nothing is counted."""
        self._ignores += 1
        try:
            yield
        finally:
            self._ignores -= 1

    # --- values ---

    def value(self, tensor):
        """The value of a tensor; None where it is not known."""
        if isinstance(tensor, FakeTensor):
            return self._values.get(id(tensor))
        return tensor

    def _set_value(self, tensor, value) -> None:
        key = id(tensor)
        self._values[key] = value
        weakref.finalize(tensor, self._values.pop, key, None)

    def _with_value(self, value, device):
        """A fake tensor on ``device`` of a known value."""
        tensor = torch.ops.aten.empty.memory_format(list(value.shape), dtype=value.dtype, device=device)
        self._set_value(tensor, value)
        return tensor

    def _compute_values(self, func, args, kwargs, outputs) -> None:
        """Compute the values of ``outputs`` where all operands are known."""
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_known = all(self.value(tensor) is not None for tensor in tensors) and _is_followed(name, outputs)
        if not is_known:
            for output in outputs:
                if func._schema.is_mutable:
                    self._values.pop(id(output), None)
            if name in ("aten::any", "aten::all"):
                # Of unknown floats nothing is wrong: all are finite, none overflows.
                with _disable_current_modes():
                    for output in outputs:
                        self._set_value(output, torch.full(output.shape, name == "aten::all"))
            return
        with _disable_current_modes():
            real_args, real_kwargs = tree_map(self._real, (args, kwargs))
            if real_kwargs.get("device") is not None:
                real_kwargs["device"] = "cpu"
            real_kwargs.pop("pin_memory", None)
            results = [leaf for leaf in tree_leaves(func(*real_args, **real_kwargs)) if isinstance(leaf, torch.Tensor)]
        for output, result in zip(outputs, results, strict=True):
            if self.value(output) is not result:
                self._set_value(output, result)

    def _real(self, leaf):
        if isinstance(leaf, torch.Tensor):
            return self.value(leaf)
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return leaf

    # --- bytes ---

    def _see_storage(self, tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._bytes_of:
            self._bytes_of[key] = 0
            self.set_bytes(storage, storage.nbytes())
            weakref.finalize(storage, self._forget_storage, key)

    def set_bytes(self, storage, size: int) -> None:
        """A storage on the device has ``size`` bytes from now on."""
        key = storage._cdata
        if key not in self._bytes_of:
            return
        size = -(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self.bytes += size - self._bytes_of[key]
        self._bytes_of[key] = size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _forget_storage(self, key) -> None:
        self.bytes -= self._bytes_of.pop(key, 0)

    # --- waits ---

    def wait(self, tensor) -> None:
        """The host waits for ``tensor``: count it at the innermost line of the package."""
        if tensor.device.type != "cuda" or self._ignores:
            return
        frame = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if "kl_comedy" in path.parts:
                inside = path.parts[len(path.parts) - path.parts[::-1].index("kl_comedy") :]
                self.waits[f"{'/'.join(inside)}:{frame.f_code.co_qualname}"] += 1
                return
            frame = frame.f_back
        self.waits["outside of the package"] += 1

    # --- dispatch ---

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind not in PLAIN_TENSORS for kind in kinds):
            return NotImplemented  # a DTensor's local parts come back here
        if self._ignores:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func.namespace in COLLECTIVE_NAMESPACES:
            return self._collective(func, name, args, kwargs, tensors)
        if name in ANSWERS:
            return self._answer(name, tensors[0])
        if _copies_to_host(name, tensors, kwargs):
            self.wait(tensors[-1])
        if name in DATA_DEPENDENT:
            return self._data_dependent(func, args, kwargs, tensors)
        known_result = None
        if name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            args, known_result = self._without_boolean_indices(func, args)
        self._check(name, tensors)
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        if known_result is not None:
            self._set_value(result, known_result)
        else:
            self._compute_values(func, args, kwargs, outputs)
        for output in outputs:
            self._see_storage(output)
        if func._overloadpacket in flop_registry and any(tensor.device.type == "cuda" for tensor in tensors):
            operations = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
            self.flop[_floating(tensors)[0].dtype] += operations
        return result

    def _check(self, name, tensors) -> None:
        floating = _floating(tensors)
        if name in ONE_DTYPE:
            dtypes = sorted({str(tensor.dtype) for tensor in floating})
            if len(dtypes) > 1:
                self.violations[f"{name} of {' and '.join(dtypes)}"] += 1
        on_device = [tensor for tensor in floating if tensor.device.type == "cuda"]
        if name in NOT_DETERMINISTIC and on_device:
            self.violations[f"{name} has no deterministic kernel"] += 1

    def _answer(self, name, tensor):
        """The result of an operation whose result is no tensor."""
        if name == "is_pinned":
            return False
        if name == "record_stream":
            return None
        self.wait(tensor)
        if name == "equal":
            return True
        value = self.value(tensor)
        if value is not None:
            with _disable_current_modes():
                return value.item()
        if tensor.dtype == torch.bool:
            return True
        return 0.0 if tensor.is_floating_point() else 0

    def _data_dependent(self, func, args, kwargs, tensors):
        self.wait(tensors[0])
        with _disable_current_modes():
            real_args, real_kwargs = tree_map(self._real, (args, kwargs))
            results = func(*real_args, **real_kwargs)
        device = tensors[0].device
        made = tree_map(
            lambda leaf: self._with_value(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, results
        )
        for output in tree_leaves(made):
            self._see_storage(output)
        return made

    def _without_boolean_indices(self, func, args):
        """The arguments of ``index`` with a mask's positions in its place; and the value of the result, if known."""
        tensor, indices = args
        self.wait(tensor)
        positions = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                positions.append(index)
                continue
            with _disable_current_modes():
                axes = self.value(index).nonzero(as_tuple=True)
            positions += [self._with_value(axis, index.device) for axis in axes]
        value = self.value(tensor)
        if value is None:
            return (tensor, positions), None
        with _disable_current_modes():
            return (tensor, positions), func(value, [self._real(index) for index in indices])

    def _collective(self, func, name, args, kwargs, tensors):
        result = func(*args, **kwargs)
        if "wait" in name:
            return result
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for output in outputs:
            self._see_storage(output)
        largest = max((tensor.nbytes for tensor in [*tensors, *outputs]), default=0)
        device_and_dtype = ("", "")
        if tensors:
            device_and_dtype = (tensors[0].device.type, str(tensors[0].dtype))
        self.collectives.append((name, *device_and_dtype, largest))
        return result


def _is_followed(name, outputs) -> bool:
    """Whether values of ``outputs`` are computed beside their shapes."""
    makes_memory = name.startswith(("aten::empty", "aten::new_empty", "aten::set_", "aten::resize_"))
    if makes_memory or "rand" in name or "bernoulli" in name:
        return False
    for output in outputs:
        limit = KNOWN_FLOATS if output.is_floating_point() else KNOWN_ELEMENTS
        if output.numel() > limit:
            return False
    return True


def _floating(tensors):
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _copies_to_host(name, tensors, kwargs) -> bool:
    if name == "_to_copy":
        device = kwargs.get("device")
        to_host = device is not None and torch.device(device).type == "cpu"
        return to_host and tensors[0].device.type == "cuda"
    if name == "copy_" and len(tensors) > 1:
        return tensors[0].device.type == "cpu" and tensors[1].device.type == "cuda"
    return False


def _fused_attention(trace, plain_attention):
    """What torch takes on a GPU for attention with a mask; a CPU build would take it apart into products."""

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if query.device.type == "cpu":
            return plain_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if enable_gqa:
            repeats = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        with_backward = torch.is_grad_enabled()
        return efficient(query, key, value, attn_mask, with_backward, dropout_p, is_causal, scale=scale)[0]

    return attention


def _patch_torch(trace: Trace) -> None:
    """For the rest of this process: what goes past a dispatch mode, or would be counted though no GPU does it."""
    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage, size):
        trace.set_bytes(storage, size)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = resize_and_count
    tolist = FakeTensor.tolist

    def tolist_of_value(tensor):
        value = trace.value(tensor)
        if value is None and tensor.is_floating_point():
            # Not 0: these are sums of metrics, and a mean over 0 tokens would be missing.
            with _disable_current_modes():
                value = torch.ones(tensor.shape)
        if value is None:
            return tolist(tensor)
        trace.wait(tensor)
        with _disable_current_modes():
            return value.tolist()

    FakeTensor.tolist = tolist_of_value
    functional = torch.nn.functional
    functional.scaled_dot_product_attention = _fused_attention(trace, functional.scaled_dot_product_attention)
    # DTensor finds the shape of a result by computing it on fake tensors of its own.
    for name in ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"):
        setattr(ShardingPropagator, name, _ignoring(trace, getattr(ShardingPropagator, name)))
    # The ranks of a mesh are a tensor, which must be real.
    mesh_module = torch.distributed.device_mesh
    mesh_module.init_device_mesh = without_modes(mesh_module.init_device_mesh)
    dist.init_device_mesh = mesh_module.init_device_mesh
    mesh_module.DeviceMesh.__getitem__ = without_modes(mesh_module.DeviceMesh.__getitem__)


def _ignoring(trace, function):
    def call(*args, **kwargs):
        with trace.ignored():
            return function(*args, **kwargs)

    return call


def without_modes(function):
    """``function`` on real tensors: outside of the trace and of fake tensors."""

    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def tracing(rank: int, ranks: int):
    """A :class:`Trace` of ``rank`` of ``ranks``, inside of which tensors are fake. Once per process."""
    dist.init_process_group(backend="fake", rank=rank, world_size=ranks, store=FakeStore())
    trace = Trace()
    _patch_torch(trace)
    # One thread: the mode belongs to it, and autograd would compute in another.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with _FakeTensors(allow_non_fake_inputs=True), trace, one_thread:
        yield trace
