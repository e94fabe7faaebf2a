"""``rocm-dp doctor`` and ``rocm-dp info``: what is wrong with a machine, and what this library does on it."""
