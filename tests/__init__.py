"""All tests; the servers and the waiting they need are in :mod:`tests.support`."""
