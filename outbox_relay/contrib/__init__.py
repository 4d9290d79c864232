"""Emitting and consuming with the connections of other packages, which must be installed: one module for each."""
