"""Stand in for a package that only the import linter needs, and that structlog would load in each process."""

raise ImportError("rich is not there where the relay runs")
