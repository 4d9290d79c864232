"""`python -m tests.support.kafka` fetches Apache Kafka's jars ahead of the tests, or says why it cannot."""

import sys

from tests.support.kafka.jars import NoKafka, jars

try:
    sys.stderr.write(f"Apache Kafka is in {jars()}\n")
except NoKafka as reason:
    sys.stdout.write(f"No Apache Kafka here, tests will take the substitute from a wheel: {reason}\n")
