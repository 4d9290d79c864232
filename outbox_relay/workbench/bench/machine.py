"""What a figure depends on and a reader cannot see: the hardware, and the versions of all that took process."""

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
    """Cores that this process may use, the processor's model, memory, system, and how busy all of it is now."""
    return {
        "cores": str(_cores()),
        "processor": _first(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or platform.processor() or UNKNOWN,
        "memory": f"{memory_bytes() // MEGABYTE:,} MB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load at the start": f"{os.getloadavg()[0]:.2f}",
    }


def software(dsn: str, broker: str) -> dict[str, str]:
    """The versions of this package, Python, PostgreSQL and librdkafka; `broker` is what the broker is called."""
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
    """How much memory the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and all its threads so far. Raises OSError when it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had resident so far. Raises OSError when it is gone."""
    return int(_first(r"^VmHWM:\s*(\d+) kB$", f"/proc/{pid}/status") or 0) * 1024


def resident_bytes(pid: int) -> int:
    """The memory that a process has resident now. Raises OSError when it is gone."""
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
