"""A CUDA device for shapes only: torch's CPU build, and fake tensors on ``cuda``.

:func:`load_guard` must run before torch is imported, because torch asks once whether there is a GPU. The library that
it loads is compiled by g++ in two to five seconds, and stays beside compiled modules for this version of torch.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
DEVICES = 8
MEMORY_BYTES = 80 * 2**30


def load_guard() -> None:
    """Compile the device guard where that was not done yet, and load it. Raises where torch is imported already."""
    if "torch" in sys.modules:
        raise RuntimeError("the guard must be loaded before torch")
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    guard = _compiled(torch_folder)
    # Global, so that the guard finds torch's symbols.
    for path in (torch_folder / "lib/libc10.so", torch_folder / "lib/libtorch_cpu.so", guard):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _compiled(torch_folder: Path) -> Path:
    """The guard as a library. Another version of torch or of the source has a file of its own."""
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    # In the checkout and not in a folder that all users may write to: it is loaded as code.
    library = SOURCE.parent / "__pycache__" / f"fake_cuda_{digest}.so"
    library.parent.mkdir(exist_ok=True)
    if library.exists():
        return library
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(unfinished)]
    subprocess.run([*command, "-I", str(torch_folder / "include")], check=True)
    # Renamed when it is whole: two processes may compile it at once.
    unfinished.rename(library)
    return library


class FakeStream:
    """One stream: what is on which stream is not followed."""

    device_index = 0

    def __init__(self, *args, **kwargs) -> None: ...
    def wait_event(self, event) -> None: ...
    def wait_stream(self, stream) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event=None):
        return event or FakeEvent()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class FakeEvent:
    """An event that has happened."""

    def __init__(self, *args, **kwargs) -> None: ...
    def record(self, stream=None) -> None: ...
    def wait(self, stream=None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def patch_torch_cuda(device_index: int) -> None:
    """Replace what torch.cuda asks of a driver, for the rest of this process."""
    import torch

    stream = FakeStream()
    properties = types.SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, total_memory=MEMORY_BYTES, multi_processor_count=132, uuid="GPU-0"
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": DEVICES,
        "current_device": device_index,
        "current_stream": stream,
        "default_stream": stream,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
        "_is_in_bad_fork": False,
        "_lazy_init": None,
        "set_device": None,
        "set_stream": None,
        "synchronize": None,
        "empty_cache": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    torch.accelerator.current_stream = torch.cuda.current_stream
    torch.cuda.Stream = FakeStream
    torch.cuda.Event = FakeEvent
    torch.Event = FakeEvent
    torch.cuda.stream = contextlib.nullcontext
    torch.cuda.device = contextlib.nullcontext
