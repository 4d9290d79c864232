"""PostgreSQL and a Kafka broker from wheels, each in a temporary directory. Independent of the relay.

Every server is a context manager. It starts the server on a free port of the loopback address and removes it with all
its data at the end. If the Python process dies, the server is stopped and its directory removed as well.
"""
