"""Fetch Apache Kafka's jars before the tests, or print why that fails."""

import sys

from tests.support.kafka.jars import NoKafka, jars

try:
    sys.stderr.write(f"Apache Kafka is in {jars()}\n")
except NoKafka as reason:
    sys.stdout.write(f"no Apache Kafka, tests use the substitute from a wheel: {reason}\n")
