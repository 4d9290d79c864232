"""Check the model, and that it fails without each of its rules. The exit code is 1 if either check fails."""

import sys

from tests.model.spin import BROKEN, FAULTS, SOUND, check, missing


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Check everything, print a line per run and return the exit code."""
    if absent := missing():
        sys.stderr.write(f"missing: {', '.join(absent)}; on Debian: apt-get install spin gcc libc6-dev\n")
        return 1
    wrong = 0
    for name, faults in SOUND.items():
        checked = check(faults)
        wrong += not checked.whole
        _say(f"{name:<34}{checked}")
    for rule, expected in BROKEN.items():
        checked = check((*FAULTS, *rule.split()))
        wrong += expected not in (checked.violated or "")
        _say(f"{rule:<34}{checked}")
    _say("as expected" if not wrong else f"{wrong} of the runs are not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
