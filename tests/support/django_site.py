"""A Django project in this process: its settings, and its databases that tests place where they need them."""

from __future__ import annotations

import django
from django.conf import settings
from django.db import connections
from psycopg.conninfo import conninfo_to_dict

from tests.support.database import Database

POSTGRES = {"ENGINE": "django.db.backends.postgresql"}


def set_up() -> None:
    """Configure Django once in this process, with the application of the outbox."""
    if settings.configured:
        return
    settings.configure(
        SECRET_KEY="for tests",
        DATABASES={
            "default": {**POSTGRES},
            "shop": {**POSTGRES},
            "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
        },
        INSTALLED_APPS=["outbox_relay.contrib.django"],
        USE_TZ=True,
    )
    django.setup()


def place(alias: str, database: Database, *, name: str | None = None, user: str | None = None) -> None:
    """Let a database of Django be that of a test, or another one of its server."""
    found = conninfo_to_dict(database.dsn)
    there = {"HOST": found["host"], "PORT": found["port"], "USER": user or found["user"]}
    connections[alias].close()
    connections[alias].settings_dict.update({**there, "NAME": name or found["dbname"]})
