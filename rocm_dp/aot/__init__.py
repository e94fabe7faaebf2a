"""Kernels compiled ahead of time for AMD GPUs that are not here, and what their machine code must look like."""
