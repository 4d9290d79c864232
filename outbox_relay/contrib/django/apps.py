"""The application of Django that installs and checks schema outbox."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks


class OutboxConfig(AppConfig):
    """Schema outbox as an application of Django. docs/django.md shows every use."""

    name = "outbox_relay.contrib.django"
    label = "outbox_relay"
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks."""
        from outbox_relay.contrib.django.checks import check_databases, check_schemas

        checks.register(check_databases, "outbox")
        checks.register(check_schemas, checks.Tags.database)
