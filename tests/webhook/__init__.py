"""Tests of the webhook sink."""
