"""Install schema outbox, in the version of the installed package."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from outbox_relay.contrib.django.operations import OutboxSchema


class Migration(migrations.Migration):
    """Create schema outbox. Later versions come with ``manage.py outbox migrate``."""

    initial = True
    dependencies: ClassVar = []
    operations: ClassVar = [OutboxSchema()]
