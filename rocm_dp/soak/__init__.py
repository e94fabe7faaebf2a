"""``rocm-dp soak``: proof that nothing leaks, by gates that state their power and leaks injected on purpose."""
