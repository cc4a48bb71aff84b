"""Resident memory of this process and its resettable peak (Linux)."""

from __future__ import annotations

from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs, this resets the peak resident set size; see proc(5)."""


def read_status(text: str, field: str) -> int:
    """A field of /proc/PID/status in bytes. Raises :class:`KeyError` if the field is missing.

    >>> read_status("VmHWM:\\t    2168 kB\\n", "VmHWM")
    2220032
    """
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            # The kernel writes "kB" and means KiB.
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def resident() -> int:
    """Resident bytes now."""
    return read_status(STATUS.read_text(), "VmRSS")


def peak() -> int:
    """Largest resident size in bytes since the process started or since :func:`reset_peak`."""
    return read_status(STATUS.read_text(), "VmHWM")


def reset_peak() -> None:
    """Reset the peak. Raises :class:`OSError` if the kernel does not allow it."""
    CLEAR_REFS.write_text(RESET_PEAK)
