"""``rocm-dp demo``: a trace replayed over the ranks, every verb of every step checked against the oracle."""
