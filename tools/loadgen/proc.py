"""Resources of a process, from /proc (Linux)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tools.loadgen.target import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    rss_bytes: int
    fds: int
    threads: int


def sample_process(pid: int) -> ProcessSample:
    """Raises UsageError when the process cannot be read."""
    root = Path("/proc") / str(pid)
    try:
        fields = _status(root / "status")
        return ProcessSample(
            rss_bytes=int(fields["VmRSS"].split()[0]) * 1024,
            fds=len(os.listdir(root / "fd")),
            threads=int(fields["Threads"]),
        )
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(f"cannot read process {pid}: {error}") from None


def thread_names(pid: int) -> dict[int, str]:
    """Thread id -> name.  Raises UsageError."""
    names: dict[int, str] = {}
    try:
        for entry in os.listdir(f"/proc/{pid}/task"):
            try:
                names[int(entry)] = Path(f"/proc/{pid}/task/{entry}/comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended since it was listed
    except OSError as error:
        raise UsageError(f"cannot read process {pid}: {error}") from None
    return names


def thread_cpu_s(pid: int, tid: int) -> float:
    """CPU seconds of one thread so far (user and system).  Raises UsageError.

    ``schedstat`` counts nanoseconds; ``stat`` has only clock ticks and is the fallback.
    """
    root = Path(f"/proc/{pid}/task/{tid}")
    try:
        running = int((root / "schedstat").read_text().split()[0])
        if running:
            return running / 1e9
    except (OSError, ValueError, IndexError):
        pass  # a kernel without scheduler statistics
    try:
        # The name is in parentheses and may contain spaces; utime and stime are fields 14 and 15.
        fields = (root / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"cannot read thread {tid} of process {pid}: {error}") from None


def _status(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
