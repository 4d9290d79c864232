"""Measurements that are commands of their own: figures and ratios, never assertions about time."""
