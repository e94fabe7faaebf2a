"""Where a machine tells of itself: paths of the kernel's and ROCm's files, and command lines."""

KFD, DRM = "/sys/class/kfd/kfd", "/sys/class/drm"
ROCM_VERSION, RCCL_HEADER = "/opt/rocm/.info/version", "/opt/rocm/include/rccl/rccl.h"
AMDGPU_VERSION = "/sys/module/amdgpu/version"
STATUS, LIMITS, CPUINFO, INIT = "/proc/self/status", "/proc/self/limits", "/proc/cpuinfo", "/proc/1/comm"
IPC_NAMESPACE = "/proc/self/ns/ipc"
NUMA_BALANCING = "/proc/sys/kernel/numa_balancing"
PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
NVIDIA_GPUS = (
    "nvidia-smi --query-gpu=index,name,driver_version,memory.used,mig.mode.current,"
    "ecc.errors.uncorrected.volatile.total --format=csv,noheader,nounits"
)
NVIDIA_LINKS = "nvidia-smi topo -m"
NVIDIA_APPS = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
AMD_SMI = "amd-smi version --json"
