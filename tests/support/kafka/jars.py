"""Jars of Apache Kafka, fetched once by Maven into the cache of the checkout."""

import shutil
from pathlib import Path

from tests.support import maven

POM = Path(__file__).with_name("pom.xml")


class NoKafka(Exception):
    """Apache Kafka is not available on this machine. The message has the reason and the remedy."""


def jars(pom: Path = POM) -> Path:
    """Return the directory of the jars in ``pom``, fetched if needed. Raise :class:`NoKafka`."""
    if shutil.which("java") is None:
        raise NoKafka("java is missing: install a Java runtime of version 17 or newer")
    try:
        return maven.fetched(pom, f"{pom.parent.name}-libs", "copy-dependencies")
    except maven.NotFetched as reason:
        raise NoKafka(str(reason)) from reason
