"""The process that calls handlers: imports the application's code and nothing of the relay."""
