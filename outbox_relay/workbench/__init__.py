"""Programs beside the service: demo, benchmarks, embedded servers (extra `demo`)."""
