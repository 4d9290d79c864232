"""The chaos suite: writers, two sinks and several relays under faults. Arrivals are compared with committed events."""
