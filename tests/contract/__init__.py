"""One suite of scenarios that every sink passes; a sink joins with a harness of its own in `conftest.py`."""
