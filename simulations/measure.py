"""Peak memory of a piece of a program, as the operating system saw it."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import resource
except ImportError:  # Windows has no such module
    resource = None  # type: ignore[assignment]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """The growth of the process's resident memory from here to the highest point before `read`.

    On Linux the kernel's high-water mark of this process (``VmHWM``) is put back at the start, so
    that what the program held before, its libraries and its data, does not count. Where that is not
    possible the mark of the whole life of the process is compared with its value at the start: a
    lower bound, if more was held before than since. None where the system tells neither.

    The measurement is honest in a fresh process only: memory that an earlier run freed and the
    allocator kept is used again without a trace.

    Attributes:
        exact: whether the mark could be put back.
    """

    def __init__(self) -> None:
        self.exact = _reset_high_water()
        self._start = _status_mib("VmRSS") if self.exact else _lifetime_peak_mib()

    def read(self) -> float | None:
        """Growth of the peak since construction, in MiB."""
        now = _status_mib("VmHWM") if self.exact else _lifetime_peak_mib()
        if now is None or self._start is None:
            return None
        return max(0.0, now - self._start)


def _reset_high_water() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _status_mib(name: str) -> float | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return float(line.split()[1]) / 1024.0
    return None


def _lifetime_peak_mib() -> float | None:
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Bytes on macOS, KiB elsewhere.
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
