"""Passes of the retention, which relays and the command line share: days are checked, archived and emptied."""
