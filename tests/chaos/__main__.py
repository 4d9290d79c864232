"""`python -m tests.chaos --form short|long [--seed N] [--report FILE]`: exit code 0 if every promise was kept."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.forms import FORMS
from tests.chaos.report import markdown, write
from tests.chaos.run import Run, load, say


def main() -> int:
    """Run one form of the suite and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--form", choices=sorted(FORMS), default="short")
    parser.add_argument("--seed", type=int, help="seed of all random choices; by default a random one")
    parser.add_argument("--report", type=Path, help="write the figures to FILE.json and FILE.md", metavar="FILE")
    parser.add_argument("--keep", type=Path, help="keep the logs in this directory, even after a success")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    say(f"chaos, form {options.form}, seed {seed}, load {load()}")
    directory = options.keep or Path(tempfile.mkdtemp(prefix="outbox-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    outcome = Run(FORMS[options.form], seed, directory).run()
    say(markdown(outcome))
    if options.report:
        write(outcome, options.report)
    for failure in outcome.record.failures:
        say(f"FAILED: {failure}")
    if outcome.record.failures:
        say(f"seed {seed}; the logs are in {directory}")
        return 1
    say(f"all is as promised; seed {seed}")
    if not options.keep:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
