"""Demo, benchmarks and embedded servers, installed with the extra `demo`."""
