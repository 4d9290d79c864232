"""The names of librdkafka's settings, and the values that it accepts."""

from __future__ import annotations

import re

from confluent_kafka import KafkaException, Producer

_UNKNOWN = "no such setting"
_RANGE = re.compile(r"outside allowed range (-?[\d.]+?)\.\.(-?[\d.]+)")


def is_property(name: str) -> bool:
    """Return whether librdkafka has a setting of this name. No client is made and nothing is connected.

    Settings are read in order, so the unknown one after it keeps a producer from being made.
    """
    try:
        Producer({name: "", _UNKNOWN: ""})
    except (KafkaException, TypeError, ValueError) as error:
        return f'No such configuration property: "{name}"' not in str(error)
    return True


def value_fault(name: str, value: str | float) -> str | None:
    """Return why librdkafka refuses the value of a setting, without the value, or None. No client is made."""
    try:
        Producer({name: value, _UNKNOWN: ""})
    except (KafkaException, TypeError, ValueError) as error:
        text = str(error)
        if f'"{_UNKNOWN}"' in text:
            return None
        if found := _RANGE.search(text):
            return f"should be a number from {found[1]} to {found[2]}"
        return "should be true or false" if "Expected bool" in text else "is a value that librdkafka does not accept"
    return None
