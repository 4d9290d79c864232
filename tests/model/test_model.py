"""The model of claim, lease, settle and hand-over holds, and fails without each of its rules."""

import pytest

from tests.model.spin import BROKEN, FAULTS, SOUND, check, missing
from tests.support.installed import absent

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True, scope="module")
def programs() -> None:
    """Skip the tests if spin is not installed; fail in CI."""
    if programs := missing():
        absent(" and ".join(programs), "spin", "gcc", "libc6-dev")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("faults", SOUND.values(), ids=SOUND)
def test_model_holds_in_every_state(faults: tuple[str, ...]) -> None:
    checked = check(faults)
    assert checked.violated is None
    assert checked.whole
    assert checked.states > 100_000


@pytest.mark.parametrize("rule", BROKEN)
def test_model_fails_without_a_rule(rule: str) -> None:
    checked = check((*FAULTS, *rule.split()))
    assert BROKEN[rule] in (checked.violated or "no error")
