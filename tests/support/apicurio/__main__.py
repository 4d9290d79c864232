"""Fetch the schema registry before the tests, or print why that fails."""

import sys

from tests.support.apicurio import NoRegistry, unpacked

try:
    sys.stderr.write(f"Apicurio Registry is in {unpacked()}\n")
except NoRegistry as reason:
    sys.stdout.write(f"no schema registry, its tests are skipped: {reason}\n")
