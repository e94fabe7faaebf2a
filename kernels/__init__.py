"""Triton kernels, imported as ``rocm_dp.kernels``. Nothing here imports the rest of ``rocm_dp``."""
