"""PostgreSQL: connections, statements, errors, notifications, migrations."""
