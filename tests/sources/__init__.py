"""Tests of the texts of the project: its English, its structure, and the lists that it keeps of itself."""
