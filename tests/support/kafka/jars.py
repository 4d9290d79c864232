"""Jars of Apache Kafka and what runs beside it: fetched once by Maven into the checkout's cache."""

import shutil
from pathlib import Path

from tests.support import maven

POM = Path(__file__).with_name("pom.xml")


class NoKafka(Exception):
    """Apache Kafka cannot be had on this machine; the message says why and how to mend it."""


def jars(pom: Path = POM) -> Path:
    """The directory of the jars that ``pom`` names, fetched now if they are not there. Raises :class:`NoKafka`."""
    if shutil.which("java") is None:
        raise NoKafka("java is missing: install a Java runtime of version 17 or newer")
    try:
        return maven.fetched(pom, f"{pom.parent.name}-libs", "copy-dependencies")
    except maven.NotFetched as reason:
        raise NoKafka(str(reason)) from reason
