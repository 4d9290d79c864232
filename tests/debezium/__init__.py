"""Coming from Debezium: the adapter of its outbox table, and records compared with those of a real connector."""
