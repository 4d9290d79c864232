"""A sink that keeps what it is given: for tests, with scripted verdicts."""
