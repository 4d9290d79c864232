"""Waiting ends with the fact, or at the deadline with its name."""

import pytest

from tests.support.wait import NotInTime, auntil, until


def test_until_returns_what_became_true() -> None:
    answers = iter([0, None, 3])
    assert until(lambda: next(answers), seconds=5, what="three") == 3


def test_until_names_the_fact_that_did_not_come() -> None:
    with pytest.raises(NotInTime, match="the moon: not within"):
        until(lambda: False, seconds=0, what="the moon")


async def test_auntil_returns_what_became_true() -> None:
    answers = iter([0, 3])

    async def fact() -> int:
        return next(answers)

    assert await auntil(fact, seconds=5, what="three") == 3


async def test_auntil_names_the_fact_that_did_not_come() -> None:
    async def fact() -> bool:
        return False

    with pytest.raises(NotInTime, match="the moon: not within"):
        await auntil(fact, seconds=0, what="the moon")
