"""The migration of Django that installs schema outbox, whatever its version."""
