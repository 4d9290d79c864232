"""What tests stand on: real servers that end with the run, and waiting for facts."""
