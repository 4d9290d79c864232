"""The foundation of the tests: real servers that end with the run, and waits for facts."""
