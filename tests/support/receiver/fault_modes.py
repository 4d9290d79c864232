"""Faults of a receiver, chosen by the uid of an event and its number of attempts: the same in every run."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from tests.support.receiver.answers import Behaviour, say
from tests.support.receiver.faults import hang
from tests.support.receiver.request import Request

OK = say(200)
REFUSED_EVERY, FAILED_EVERY, HUNG_EVERY = 50, 5, 250


def number(uid: str) -> int:
    """Return a number that is distributed evenly over uids."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:4])


def is_refused(uid: str) -> bool:
    """Return True for one event in fifty, which is always answered 400."""
    return number(uid) % REFUSED_EVERY == 1


def fails_twice(uid: str) -> bool:
    """Return True for every fifth event, which is answered 500 the first two times."""
    return number(uid) % FAILED_EVERY == 0


def hangs_once(uid: str) -> bool:
    """Return True for one event in 250, which gets no answer the first time."""
    return number(uid) % HUNG_EVERY == 3


@dataclass
class FaultModes:
    """Chooses the answer to each request. Every `throttled_every`-th request is answered 429."""

    throttled_every: int = 2000
    retry_after: str = "1"
    asked: int = 0
    _came: Counter[str] = field(default_factory=Counter[str])

    def decide(self, request: Request) -> tuple[str, Behaviour]:
        """Return a word for the log and the behaviour for the request."""
        uid = request.uid
        self.asked += 1
        if self.asked % self.throttled_every == 0:
            return "429", say(429, ("retry-after", self.retry_after))
        self._came[uid] += 1
        if is_refused(uid):
            return "400", say(400, body=b"never this one")
        if fails_twice(uid) and self._came[uid] <= 2:
            return "500", say(500, body=b"try again")
        if hangs_once(uid) and self._came[uid] == 1:
            return "hang", hang
        return "200", OK
