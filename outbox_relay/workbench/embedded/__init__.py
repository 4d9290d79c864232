"""Servers from wheels, for trying things out: PostgreSQL and a Kafka broker, each in a temporary directory.

Nothing here knows the relay. Every server is a context manager that starts it on a free port of the loopback address
and removes it with all its data at the end; should the Python process die, the server ends and its directory goes too.
"""
