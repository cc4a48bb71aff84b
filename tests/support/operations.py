"""Which operations of torch run within a block."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Names of the operations that ran, with the dtype of their first tensor."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        dtype = next((arg.dtype for arg in args if isinstance(arg, torch.Tensor)), None)
        self.names.add((func._schema.name.removeprefix("aten::"), dtype))
        return func(*args, **(kwargs or {}))
