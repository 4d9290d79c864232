"""The image that .ci/image built, and services in it, each as the image's own user."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.packaging import compose
from tests.packaging.compose import Service

BUILDAH = compose.ROOT / ".ci/buildah"
NAME = "localhost/outbox-relay"
SECONDS = 120


def buildah(*arguments: str | Path) -> str:
    """Return the output of buildah. Raises AssertionError with its error when it fails."""
    done = subprocess.run([BUILDAH, *arguments], capture_output=True, check=False, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Image:
    """A container made of the image: a root directory that all its processes share, and the machine's network.

    Runs services for a :class:`tests.packaging.stack.Stack`. As a context manager it is made, and removed at the end.
    """

    def __init__(self) -> None:
        self._container = ""

    def __enter__(self) -> Self:
        self._container = buildah("from", "--pull-never", NAME)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        buildah("rm", self._container)

    @property
    def config(self) -> dict[str, Any]:
        """Return the image's configuration in Docker's terms."""
        return json.loads(buildah("inspect", "--type", "image", NAME))["Docker"]["config"]

    def root(self) -> Path:
        """Return the root directory, as this machine sees it."""
        return Path(buildah("mount", self._container))

    def shell(self, script: str) -> str:
        """Run a shell script inside, and return its output."""
        return buildah("run", self._container, "--", "sh", "-euc", script)

    def command(
        self, service: Service, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[list[str | Path], dict[str, str]]:
        """Return buildah's command, which runs it inside, with the service's mounts and nothing of this environment."""
        mounts = [f"--volume={mount.source}:{mount.target}:ro" for mount in service.mounts]
        variables = [f"--env={name}={value}" for name, value in environment.items()]
        return [BUILDAH, "run", *mounts, *variables, self._container, "--", *arguments], dict(os.environ)

    def process(self, started: int) -> int:
        """Return the innermost process: buildah starts itself again inside, twice, and then the service."""
        pid = started
        while children := _children(pid):
            pid = children[0]
        return 0 if Path(f"/proc/{pid}/comm").read_text().startswith(("buildah", "memfd")) else pid


def _children(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
