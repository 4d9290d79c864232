"""Install schema outbox, in the version of the installed package."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

from outbox_relay.contrib.django.models import PlaceField
from outbox_relay.contrib.django.operations import OutboxSchema


class Migration(migrations.Migration):
    """Create schema outbox, and the state of its models. Later versions come with ``manage.py outbox migrate``."""

    initial = True
    dependencies: ClassVar = []
    operations: ClassVar = [
        OutboxSchema(),
        migrations.CreateModel(
            name="EventDelivery",
            fields=[
                ("place", PlaceField(primary_key=True, serialize=False)),
                ("event_id", models.BigIntegerField(db_column="id")),
                ("sink", models.TextField()),
                ("uid", models.UUIDField()),
                ("type", models.TextField()),
                ("key", models.TextField(null=True)),
                ("state", models.TextField()),
                ("attempts", models.IntegerField()),
                ("last_error", models.TextField(null=True)),
                ("last_status", models.IntegerField(null=True)),
                ("last_attempt_at", models.DateTimeField(null=True)),
                ("created_at", models.DateTimeField()),
            ],
            options={
                "verbose_name": "delivery",
                "verbose_name_plural": "deliveries",
                "db_table": '"outbox"."delivery"',
                "ordering": ["-event_id", "-sink"],
                "permissions": [
                    ("retry_eventdelivery", "Can retry deliveries"),
                    ("discard_eventdelivery", "Can discard deliveries"),
                ],
                "managed": False,
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="LoggedEvent",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("uid", models.UUIDField()),
                ("type", models.TextField()),
                ("key", models.TextField(null=True)),
                ("shard", models.SmallIntegerField()),
                ("content_type", models.TextField(null=True)),
                ("deliver_at", models.DateTimeField(null=True)),
                ("created_at", models.DateTimeField()),
            ],
            options={
                "verbose_name": "event",
                "db_table": '"outbox"."event"',
                "ordering": ["-id"],
                "permissions": [("view_payload", "Can view payloads and headers")],
                "managed": False,
                "default_permissions": ("view",),
            },
        ),
    ]
