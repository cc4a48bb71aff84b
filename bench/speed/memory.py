"""Resident memory of this process, and its peak since a moment of our choosing (Linux)."""

from __future__ import annotations

from pathlib import Path

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What resets the peak resident set size when written to clear_refs; see proc(5)."""


def read_status(text: str, field: str) -> int:
    """A field of /proc/PID/status in bytes. Raises :class:`KeyError` where it is not there.

    >>> read_status("VmHWM:\\t    2168 kB\\n", "VmHWM")
    2220032
    """
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def resident() -> int:
    """Bytes resident now."""
    return read_status(STATUS.read_text(), "VmRSS")


def peak() -> int:
    """Largest resident size since the process began, or since :func:`reset_peak`."""
    return read_status(STATUS.read_text(), "VmHWM")


def reset_peak() -> None:
    """Forget the peak so far. Raises :class:`OSError` where the kernel does not allow it."""
    CLEAR_REFS.write_text(RESET_PEAK)
