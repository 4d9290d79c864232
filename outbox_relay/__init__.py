"""Transactional outbox relay for PostgreSQL.

Applications use :mod:`outbox_relay.outbox`, :mod:`outbox_relay.inbox` and ``contrib``, and nothing else.
"""

__version__ = "0.1.0"
