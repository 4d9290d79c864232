"""Wire formats of an event: topics, headers, CloudEvents, signatures. Pure."""
