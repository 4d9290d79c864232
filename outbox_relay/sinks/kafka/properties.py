"""The names of librdkafka's settings."""

from __future__ import annotations

from confluent_kafka import KafkaException, Producer

_UNKNOWN = "no such setting"


def is_property(name: str) -> bool:
    """Return whether librdkafka has a setting of this name. No client is made and nothing is connected.

    Settings are read in order, so the unknown one after it keeps a producer from being made.
    """
    try:
        Producer({name: "", _UNKNOWN: ""})
    except (KafkaException, TypeError, ValueError) as error:
        return f'No such configuration property: "{name}"' not in str(error)
    return True
