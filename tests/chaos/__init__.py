"""The chaos suite: writers, two sinks and a fleet of relays under faults, judged by what was committed and arrived."""
