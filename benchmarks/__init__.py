"""Measurements: ratios in one run, medians, and exact counts."""
