"""amdsmi and NVML: the vendors' own libraries, each optional."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from typing import Any

from rocm_dp.soak.sample import AbsentError


def quiet_import(name: str) -> Any:
    """Import ``name``; AbsentError for whatever its import raises. What it prints is part of the reason."""
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            return import_module(name)
    except Exception as error:  # amdsmi raises KeyError where there is no driver
        words = " ".join(said.getvalue().split())
        reason = f"{name} can't be imported ({type(error).__name__}: {error})"
        raise AbsentError(f"{reason}; it said: {words}" if words else reason) from error


class AmdsmiSampler:
    """``amdsmi.vram`` (bytes used on all GPUs), ``amdsmi.processes``, ``amdsmi.ecc`` errors, ``amdsmi.xgmi``.

    ``amdsmi.xgmi`` adds up the xGMI error status of the GPUs: 0 when none has seen an error.
    """

    name = "amdsmi"

    def __init__(self) -> None:
        self._smi = quiet_import("amdsmi")
        with redirect_stdout(io.StringIO()):
            self._smi.amdsmi_init()
            self._gpus = self._smi.amdsmi_get_processor_handles()
        if not self._gpus:
            raise AbsentError("amdsmi sees no GPU")

    def read(self) -> dict[str, float]:
        """Ask every GPU; what a GPU does not support is left out."""
        smi, values = self._smi, dict.fromkeys(("amdsmi.vram", "amdsmi.processes"), 0.0)
        for gpu in self._gpus:
            values["amdsmi.vram"] += smi.amdsmi_get_gpu_memory_usage(gpu, smi.AmdSmiMemoryType.VRAM)
            values["amdsmi.processes"] += len(smi.amdsmi_get_gpu_process_list(gpu))
            with suppress(smi.AmdSmiException):
                counts = smi.amdsmi_get_gpu_total_ecc_count(gpu)
                bad = counts["correctable_count"] + counts["uncorrectable_count"]
                values["amdsmi.ecc"] = values.get("amdsmi.ecc", 0.0) + bad
            with suppress(smi.AmdSmiException):
                state = int(smi.amdsmi_gpu_xgmi_error_status(gpu))
                values["amdsmi.xgmi"] = values.get("amdsmi.xgmi", 0.0) + state
        return values


class NvmlSampler:
    """``nvml.used`` (bytes) and ``nvml.processes`` of one NVIDIA GPU; other processes on it count."""

    name = "nvml"

    def __init__(self, index: int) -> None:
        self._nvml = quiet_import("pynvml")
        self._nvml.nvmlInit()
        self._gpu = self._nvml.nvmlDeviceGetHandleByIndex(index)

    def read(self) -> dict[str, float]:
        """Ask the GPU."""
        return {
            "nvml.used": float(self._nvml.nvmlDeviceGetMemoryInfo(self._gpu).used),
            "nvml.processes": float(len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._gpu))),
        }
