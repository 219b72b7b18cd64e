"""CUDA driver and NVML, as far as ranks need them to share memory: handles between processes, and what links can do.

What may not live here: which ranks share what (`peer_memory.py`). torch's symmetric memory is not used: it takes ranks
for devices by their index, and a rank that Ray starts sees its own device alone, as number 0. Handles of the driver's
IPC open devices too that are not visible (as NCCL has them do since CUDA 10.1), and NVML sees all devices.
"""

import ctypes
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final

HANDLE_BYTES: Final = 64

_LAZY_PEER_ACCESS: Final = 1
_P2P_READ, _P2P_WRITE, _P2P_ATOMICS = 0, 1, 3
_NEEDED: Final = {"reads": _P2P_READ, "writes": _P2P_WRITE, "atomic operations": _P2P_ATOMICS}


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class CudaDriver:
    """Memory of other processes' devices. All calls are of a thread whose current device is the rank's.

    Raises OSError where there is no driver, and where it refuses.
    """

    def __init__(self, library: Any = None) -> None:
        self._cuda = library or ctypes.CDLL("libcuda.so.1")
        self._cuda.cuIpcOpenMemHandle_v2.argtypes = (c_void_p, _Handle, c_uint)

    def offer(self, address: int) -> tuple[bytes, int]:
        """The handle of the allocation that an address of this process lies in, and its place there in bytes."""
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        self._call("cuIpcGetMemHandle", byref(handle), base)
        return ctypes.string_at(byref(handle), HANDLE_BYTES), address - base.value

    def open(self, handle: bytes) -> int:
        """The address at which this rank's device finds an allocation of another process."""
        address = c_uint64()
        self._call("cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def _call(self, name: str, *arguments: Any) -> None:
        if (status := getattr(self._cuda, name)(*arguments)) != 0:
            raise OSError(f"{name} failed with error {status} of the CUDA driver")


def missing_between(one: str, other: str, library: Any = None) -> str | None:
    """What of reads, writes and atomic operations the link of two devices does not have; they are named by their
    UUIDs, as `GPU-...`. Raises OSError where NVML does not tell.
    """
    nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
    _check(nvml.nvmlInit_v2(), "nvmlInit_v2")
    try:
        handles = []
        for uuid in (one, other):
            handle = c_void_p()
            _check(nvml.nvmlDeviceGetHandleByUUID(c_char_p(uuid.encode()), byref(handle)), f"NVML's device {uuid}")
            handles.append(handle)
        for what, index in _NEEDED.items():
            status = c_int()
            _check(nvml.nvmlDeviceGetP2PStatus(*handles, c_int(index), byref(status)), "nvmlDeviceGetP2PStatus")
            if status.value != 0:
                return what
        return None
    finally:
        nvml.nvmlShutdown()


def _check(status: int, what: str) -> None:
    if status != 0:
        raise OSError(f"{what} failed with error {status} of NVML")
