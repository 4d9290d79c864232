"""The operation of Django's migration: schema outbox is created, upgraded or dropped in the migration's transaction."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation

from outbox_relay.contrib.django.databases import asking, is_wanted
from outbox_relay.contrib.installing import DROP, may_drop, missing_script
from outbox_relay.domain.errors import RelayError


class OutboxSchema(Operation):
    """Create schema outbox in the version of the installed package, or upgrade it; drop it when reversed.

    Databases other than PostgreSQL, and those that a router excludes, stay as they are.
    """

    reversible = True
    reduces_to_sql = True

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change no model."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: Any, to_state: Any
    ) -> None:
        """Run what ``outbox-relay migrate --sql`` prints, from the version of this database on.

        Raises ``CommandError`` if the schema is another program's, or newer than this package works on.
        """
        connection = schema_editor.connection
        if not is_wanted(connection.alias, app_label):
            return
        try:
            missing = missing_script(asking(connection))
        except RelayError as error:
            raise CommandError(str(error)) from None
        if missing is not None:
            schema_editor.execute(missing, params=None)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: Any, to_state: Any
    ) -> None:
        """Drop schema outbox.

        Raises ``CommandError`` while a relay runs, or an event or a dead letter is not delivered.
        """
        connection = schema_editor.connection
        if not is_wanted(connection.alias, app_label):
            return
        try:
            if schema_editor.collect_sql or may_drop(asking(connection)):
                schema_editor.execute(DROP, params=None)
        except RelayError as error:
            raise CommandError(str(error)) from None

    def describe(self) -> str:
        """Return the line that ``migrate --plan`` prints."""
        return "Create or upgrade schema outbox"
