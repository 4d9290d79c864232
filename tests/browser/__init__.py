"""The page in Debian's Chromium."""
