"""Demo and development servers, installed with the extra `demo`."""
