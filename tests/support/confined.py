"""Run outbox-relay as the service manager or a container would: `python -m tests.support.confined UNIT FOLDER ARGS...`.

UNIT is a file of systemd whose system call filter, address families and ban on executable memory hold, by libseccomp,
or `-` for a container without one. Without capabilities, and by root on a file system of which only FOLDER can be
written to. What systemd takes from the process beyond that, its user and devices, stays.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
LESS, EQUAL, GREATER, MASKED = 2, 4, 6, 7
"""Values of libseccomp's enum scmp_compare."""
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
AT_FDCWD, AT_RECURSIVE, MOUNT_SETATTR, READ_ONLY = -100, 0x8000, 442, 1
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
ANALYZE = shutil.which("systemd-analyze") or "systemd-analyze"
LIBC = ctypes.CDLL(None, use_errno=True)


class Comparison(ctypes.Structure):
    """A condition on an argument of a system call."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class MountAttributes(ctypes.Structure):
    """The attributes of mounts that mount_setattr sets and clears."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


def library() -> ctypes.CDLL:
    """Return libseccomp. Raises OSError where it is missing."""
    found = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    found.seccomp_init.restype = ctypes.c_void_p
    found.seccomp_load.argtypes = [ctypes.c_void_p]
    found.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.POINTER(Comparison),
    ]
    return found


class Filter:
    """A filter of system calls with a default action."""

    def __init__(self, default: int) -> None:
        self._library = library()
        self._context = self._library.seccomp_init(ctypes.c_uint32(default))

    def add(self, action: int, name: str, *conditions: tuple[int, int, int, int]) -> None:
        """Add a rule for a call that this machine has."""
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return
        array = (Comparison * max(1, len(conditions)))(*(Comparison(*each) for each in conditions))
        code = self._library.seccomp_rule_add_array(self._context, action, number, len(conditions), array)
        if code not in (0, -errno.EACCES):  # EACCES: the default action already
            raise OSError(-code, f"seccomp_rule_add of {name}")

    def load(self) -> None:
        """Put it into force for this process and its children."""
        if code := self._library.seccomp_load(self._context):
            raise OSError(-code, "seccomp_load")


def calls(names: Iterable[str]) -> set[str]:
    """Return the system calls of a filter's value, whose groups begin with @ and contain others."""
    found = set[str]()
    for name in names:
        if not name.startswith("@"):
            found.add(name)
            continue
        done = subprocess.run([ANALYZE, "syscall-filter", name], capture_output=True, check=True, text=True)
        lines = [line.strip() for line in done.stdout.splitlines()[1:]]
        found |= calls(line for line in lines if line and not line.startswith("#"))
    return found


def directives(path: str) -> dict[str, list[str]]:
    """Return the directives of a unit, each of which may stand several times."""
    found: dict[str, list[str]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, is_directive, value = line.partition("=")
        if is_directive and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def filter_calls(service: dict[str, list[str]]) -> None:
    """Hold what the unit says of memory, address families and system calls."""
    others = Filter(ALLOW)
    if service["MemoryDenyWriteExecute"] == ["yes"]:
        both = mmap.PROT_WRITE | mmap.PROT_EXEC
        others.add(REFUSE, "mmap", (2, MASKED, both, both))
        others.add(REFUSE, "mprotect", (2, MASKED, mmap.PROT_EXEC, mmap.PROT_EXEC))
        others.add(REFUSE, "pkey_mprotect", (2, MASKED, mmap.PROT_EXEC, mmap.PROT_EXEC))
    [families] = service["RestrictAddressFamilies"]
    allowed = {int(getattr(socket, name)) for name in families.split()}
    others.add(REFUSE, "socket", (0, LESS, min(allowed), 0))
    others.add(REFUSE, "socket", (0, GREATER, max(allowed), 0))
    for family in set(range(min(allowed), max(allowed))) - allowed:
        others.add(REFUSE, "socket", (0, EQUAL, family, 0))
    named = set[str]()
    for value in service["SystemCallFilter"]:
        if value.startswith("~"):
            named -= calls(value[1:].split())
        else:
            named |= calls(value.split())
    listed = Filter(REFUSE)
    for name in sorted(named | calls(["@default"]) | {"execve"}):
        listed.add(ALLOW, name)
    others.load()
    listed.load()


def call(name: str, *arguments: Any) -> None:
    """Call a function of libc. Raises OSError when it fails."""
    if getattr(LIBC, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)


def protect_files(writable: str) -> None:
    """Forbid writing to all files outside of a folder, and show of /proc what belongs to processes."""
    call("unshare", CLONE_NEWNS)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    folder = os.fsencode(writable)
    call("mount", folder, folder, None, MS_BIND, None)
    call("mount", b"proc", b"/proc", b"proc", 0, b"subset=pid")
    for place, attributes in ((b"/", MountAttributes(set=READ_ONLY)), (folder, MountAttributes(clear=READ_ONLY))):
        size = ctypes.sizeof(attributes)
        call("syscall", MOUNT_SETATTR, AT_FDCWD, place, AT_RECURSIVE, ctypes.byref(attributes), size)


def main(arguments: Sequence[str]) -> None:
    """Take rights from this process, and run outbox-relay in it."""
    unit, writable, *rest = arguments
    service = {} if unit == "-" else directives(unit)
    if os.geteuid() == 0:
        protect_files(writable)
        for capability in range(64):
            LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.umask(int(service.get("UMask", ["0022"])[0], 8))
    if service:
        filter_calls(service)
    os.execv(sys.executable, [sys.executable, "-X", "faulthandler", "-m", "outbox_relay", *rest])  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
