"""Properties that must hold whatever the schedule."""
