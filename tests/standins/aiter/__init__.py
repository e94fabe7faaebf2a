"""A stand-in for aiter."""
