"""A real file system of a few MiB, for what happens when it is full."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def disk_of(size, folder):
    """``folder`` as a mount of ``size`` (as in ``2m``); skipped where mounting is not allowed."""
    folder.mkdir()
    # Only root may mount; a container may forbid it even so.
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
