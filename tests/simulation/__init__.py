"""Thousands of schedules of relays in one process, with simulated time, database and destination."""
