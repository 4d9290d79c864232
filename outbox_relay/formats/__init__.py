"""How an event looks on the wire: topics, headers, CloudEvents, signatures. Pure."""
