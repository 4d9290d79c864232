"""PostgreSQL and a Kafka broker from wheels, each in a directory of its own. Independent of the relay.

Every server is a context manager. It starts the server on a port of the loopback address and, unless a directory was
given, removes it with all its data at the end. If the Python process dies, the same happens.
"""
