"""Measurements: medians of many runs after a warm-up, as ratios to a peer measured in the same run."""
