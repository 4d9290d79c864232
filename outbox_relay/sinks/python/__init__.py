"""The Python sink: handlers of the application, called in the relay's process, one verdict per event."""

from outbox_relay.sinks.python.sink import PythonSink

__all__ = ["PythonSink"]
