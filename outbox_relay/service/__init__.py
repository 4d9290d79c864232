"""The relay process: built from settings, run, supervised, reloaded and stopped."""
