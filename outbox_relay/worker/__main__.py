"""Run a worker process: ``python -m outbox_relay.worker DESCRIPTOR PARENT``."""

from outbox_relay.worker.process import main

main()
