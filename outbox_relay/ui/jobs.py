"""Actions that were asked for on the page: what they did, and how far those are that take long."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from outbox_relay.domain.errors import ConfigurationError, NotFound, RelayError
from outbox_relay.service.logs import logger

KEPT_MOST = 200
"""Maximum number of jobs that are remembered."""
RUNNING_MOST = 4
"""Maximum number of jobs that run at once."""

Report = Callable[[int], None]
Work = Callable[[Report], str]
"""Does a job, reports how much is done, and returns a sentence about the result."""


class TooManyJobs(RelayError):
    """As many jobs as may run at once are running."""


@dataclass(slots=True)
class Job:
    """An action, its state and a sentence about its result."""

    id: str
    title: str
    user: str
    back: str
    state: Literal["running", "done", "failed"] = "running"
    done: int = 0
    said: str = ""
    refusal: ConfigurationError | NotFound | None = None
    """The error if it was refused for the values that it was given, and has changed nothing."""

    def as_dict(self) -> dict[str, Any]:
        """Return the job for the API."""
        return {"id": self.id, "title": self.title, "user": self.user, "state": self.state,
                "done": self.done, "result": self.said or None}  # fmt: skip


class Interrupted(RelayError):
    """The page is closed."""


class Jobs:
    """The newest jobs. One that this process does not finish can be asked for again: its steps are transactions."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def find(self, job_id: str) -> Job | None:
        """Return a job, or None if it is not remembered."""
        return self._jobs.get(job_id)

    def start(self, title: str, user: str, back: str, work: Work) -> Job:
        """Begin a job. ``back`` is the path of the page to return to.

        Raises ``TooManyJobs``.
        """
        job = Job(secrets.token_hex(8), title, user, back)
        with self._lock:
            if len(self._threads) >= RUNNING_MOST:
                raise TooManyJobs(f"{RUNNING_MOST} actions are running already: wait until one has ended")
            self._jobs[job.id] = job
            while len(self._jobs) > KEPT_MOST:
                oldest = next(each for each in self._jobs if each not in self._threads)
                del self._jobs[oldest]
            thread = threading.Thread(target=self._run, args=(job, work), name=f"job {job.id}", daemon=True)
            thread.start()
            self._threads[job.id] = thread
        return job

    def wait(self, job: Job, seconds: float) -> None:
        """Wait until ``job`` has ended, for at most ``seconds``."""
        if thread := self._threads.get(job.id):
            thread.join(seconds)

    def close(self) -> None:
        """End the jobs that run before their next step."""
        self._is_closed = True

    def _run(self, job: Job, work: Work) -> None:
        def report(done: int) -> None:
            job.done = done
            if self._is_closed:
                raise Interrupted("it was interrupted: ask for it again for the rest")

        try:
            job.said = work(report)
            job.state = "done"
        except RelayError as error:
            job.said, job.state = str(error), "failed"
            if isinstance(error, ConfigurationError | NotFound) and not job.done:
                job.refusal = error.with_traceback(None)  # jobs are remembered, and a traceback keeps what it refers to
        except Exception as error:  # an unexpected fault ends this job
            logger().error("ui.failed", path="job", exc_info=error)
            job.said, job.state = "it failed; the log of this process says why", "failed"
        finally:
            with self._lock:
                del self._threads[job.id]
