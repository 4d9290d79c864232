"""Hardware and software versions that the figures depend on, and resource usage of processes."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import confluent_kafka
import psycopg

from outbox_relay import __version__

MEGABYTE = 1 << 20
UNKNOWN = "unknown"


def hardware() -> dict[str, str]:
    """Return the available cores, processor model, memory, system and current load."""
    return {
        "cores": str(_cores()),
        "processor": _first(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or platform.processor() or UNKNOWN,
        "memory": f"{memory_bytes() // MEGABYTE:,} MB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load at the start": f"{os.getloadavg()[0]:.2f}",
    }


def software(dsn: str, broker: str) -> dict[str, str]:
    """Return the versions of the software involved; `broker` is the name of the broker."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        number = connection.info.server_version
    return {
        "outbox-relay": __version__,
        "Python": platform.python_version(),
        "PostgreSQL": f"{number // 10_000}.{number % 10_000}",
        "broker": broker,
        "librdkafka": str(confluent_kafka.libversion()[0]),
        "confluent-kafka": _version("confluent-kafka"),
        "psycopg": _version("psycopg"),
        "aiohttp": _version("aiohttp"),
    }


def memory_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_seconds(pid: int) -> float:
    """Return the processor time used by a process. Raise OSError if it does not exist."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process. Raise OSError if it does not exist."""
    return int(_first(r"^VmHWM:\s*(\d+) kB$", f"/proc/{pid}/status") or 0) * 1024


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process. Raise OSError if it does not exist."""
    return int(_first(r"^VmRSS:\s*(\d+) kB$", f"/proc/{pid}/status") or 0) * 1024


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _first(pattern: str, path: str) -> str | None:
    found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    return found[1] if found else None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return UNKNOWN
