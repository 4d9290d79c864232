"""PostgreSQL with schema outbox and a Kafka-compatible broker that stay up for development: ``outbox-relay dev``."""
