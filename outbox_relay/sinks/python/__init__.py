"""The Python sink: handlers of the application, called in worker processes, one verdict per event."""

from outbox_relay.sinks.python.sink import PythonSink
from outbox_relay.sinks.python.worker_process import WorkerTask

__all__ = ["PythonSink", "WorkerTask"]
