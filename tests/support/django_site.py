"""A Django project in this process: its settings, and its databases that tests place where they need them."""

from __future__ import annotations

import django
from django.conf import settings
from django.db import connections
from psycopg.conninfo import conninfo_to_dict

from tests.support.database import Database

POSTGRES = {"ENGINE": "django.db.backends.postgresql"}
ALIASES = ("default", "shop")


def set_up() -> None:
    """Configure Django once in this process, with the application of the outbox."""
    if settings.configured:
        return
    settings.configure(
        SECRET_KEY="for tests",
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF="tests.support.django_urls",
        DATABASES={
            "default": {**POSTGRES},
            "shop": {**POSTGRES},
            "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
        },
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "django.contrib.messages",
            "outbox_relay.contrib.django",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        STATIC_URL="static/",
        USE_TZ=True,
    )
    django.setup()


def place(alias: str, database: Database, *, name: str | None = None, user: str | None = None) -> None:
    """Let a database of Django be that of a test, or another one of its server."""
    found = conninfo_to_dict(database.dsn)
    there = {"HOST": found["host"], "PORT": found["port"], "USER": user or found["user"]}
    connections[alias].close()
    connections[alias].settings_dict.update({**there, "NAME": name or found["dbname"]})
