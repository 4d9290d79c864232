"""Actions that were asked for on the page: what they did, and how far those are that take long."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from outbox_relay.domain.errors import ConfigurationError, NotFound, RelayError
from outbox_relay.service.logs import logger

KEPT_MOST: Final = 200
"""Maximum number of jobs that are remembered."""
RUNNING_MOST: Final = 4
"""Maximum number of jobs that run at once."""

Report = Callable[[int], None]
Work = Callable[[Report], str]
"""Does a job, reports how much is done, and returns a sentence about the result."""


class TooManyJobs(RelayError):
    """As many jobs as may run at once are running."""


class Interrupted(RelayError):
    """The page is closed."""


@dataclass(slots=True)
class Job:
    """An action, its state and a sentence about its result. ``page`` is the path of the page that it is about."""

    title: str
    user: str
    page: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: Literal["running", "done", "failed"] = "running"
    done: int = 0
    result: str | None = None
    refusal: ConfigurationError | NotFound | None = None
    """The error if it was refused for the values that it was given, and has changed nothing."""
    ended: threading.Event = field(default_factory=threading.Event)

    def as_dict(self) -> dict[str, Any]:
        """Return the job for the API and its page."""
        names = ("id", "title", "user", "page", "state", "done", "result")
        return {name: getattr(self, name) for name in names}


class Jobs:
    """The newest jobs. One that this process does not finish can be asked for again: its steps are transactions."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False

    def find(self, job_id: str) -> Job:
        """Return a job. Raises ``NotFound``."""
        if (job := self._jobs.get(job_id)) is None:
            raise NotFound("this process does not know such an action: the audit says what was done")
        return job

    def start(self, job: Job, work: Work) -> None:
        """Begin ``job``. Raises ``TooManyJobs``."""
        with self._lock:
            if sum(not each.ended.is_set() for each in self._jobs.values()) >= RUNNING_MOST:
                raise TooManyJobs(f"{RUNNING_MOST} actions are running already: wait until one has ended")
            threading.Thread(target=self._run, args=(job, work), name=f"job {job.id}", daemon=True).start()
            self._jobs[job.id] = job
            if len(self._jobs) > KEPT_MOST:
                del self._jobs[next(each.id for each in self._jobs.values() if each.ended.is_set())]

    def close(self) -> None:
        """End the jobs that run before their next step."""
        self._is_closed = True

    def _run(self, job: Job, work: Work) -> None:
        def report(done: int) -> None:
            job.done = done
            if self._is_closed:
                raise Interrupted("it was interrupted: ask for it again for the rest")

        try:
            job.result = work(report)
            job.state = "done"
        except RelayError as error:
            job.result, job.state = str(error), "failed"
            if isinstance(error, ConfigurationError | NotFound) and not job.done:
                job.refusal = error.with_traceback(None)  # jobs are remembered, and a traceback keeps what it refers to
        except Exception as error:  # an unexpected fault ends this job
            logger().error("ui.failed", path="job", exc_info=error)
            job.result, job.state = "it failed; the log of this process says why", "failed"
        finally:
            job.ended.set()
