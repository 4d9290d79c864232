"""The configurations of the relays: the webhook alone, and what all but the stranger serve besides it."""

from __future__ import annotations

from outbox_relay.relay.outcomes import LEASE_MARGIN_SECONDS

TIMEOUT_SECONDS = 10
"""Time limit of a request of both webhooks."""
ROW_LEASE_SECONDS = TIMEOUT_SECONDS + 2 * LEASE_MARGIN_SECONDS
"""Time after which other relays claim the rows of a relay that died."""
CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = {lease}
[sinks.webhook]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
timeout_seconds = {timeout}
[sinks.webhook.retry]
base_seconds = 0.2
max_seconds = 2
[sinks.webhook.circuit]
probe_seconds = 0.2
probe_max_seconds = 1
[routes]
"""
CONFIG_OF_ALL = """"s*" = ["kafka"]
"work.call" = ["jobs", "calls"]
"work.effect" = ["jobs", "effects"]
{ticks}
[sinks.jobs]
type = "webhook"
claim = "rows"
fair_by = "tenant"
max_in_flight = 32
url = "{jobs_url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
timeout_seconds = {timeout}
[sinks.jobs.retry]
base_seconds = 0.2
max_seconds = 2
[sinks.jobs.circuit]
probe_seconds = 0.2
probe_max_seconds = 1
[sinks.calls]
type = "python"
handler = "tests.chaos.handlers:call"
max_in_flight = 8
[sinks.calls.retry]
base_seconds = 0.2
max_seconds = 2
[sinks.effects]
type = "python"
handler = "tests.chaos.handlers:effect"
max_in_flight = 4
transaction = true
dsn = "{application_dsn}"
[sinks.effects.retry]
base_seconds = 0.2
max_seconds = 2
[sinks.effects.circuit]
probe_max_seconds = 2
[sinks.kafka]
type = "kafka"
topic = "{topic}"
[sinks.kafka.producer]
"bootstrap.servers" = "{bootstrap}"
[sinks.kafka.circuit]
probe_max_seconds = 2
"""
