"""Tests of the pages: everything that they show is run, every link leads somewhere."""
