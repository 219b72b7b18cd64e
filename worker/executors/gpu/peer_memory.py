"""Shares of device memory that all ranks of one host reach."""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.executors.gpu.kernels.ranks import PROGRAMS
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup

HANDLE_BYTES: Final = 64

_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS of cuda.h
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
    """Reads, writes or atomic operations that the link of two devices lacks; the devices are named by their UUIDs, as
    `GPU-...`. Raises OSError if NVML does not answer.
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


_WORD_BYTES: Final = 4
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_UUID_BYTES: Final = 64
_DIGEST_BYTES: Final = 32


class Driver(Protocol):
    """Interface of a driver, as `CudaDriver` implements it."""

    def offer(self, address: int) -> tuple[bytes, int]:
        """IPC handle of the allocation that holds `address`, and the offset of `address` in it, in bytes. Raises
        OSError.
        """
        ...

    def open(self, handle: bytes) -> int: ...

    def close(self, address: int) -> None: ...


@dataclass
class PeerMemory:
    """One rank's view of all shares."""

    addresses: tuple[int, ...]
    """Address of each rank's share in this rank, its own included; multiples of 16."""
    own: Any = None
    """Keeps its own share alive. A rank that reads it is behind the last flag that its kernels have waited for, so it
    may go when they have ended."""
    release: Callable[[], None] = lambda: None
    """Gives the others' shares back: until then their devices keep them. To be called once."""


@dataclass(frozen=True)
class _Offer:
    """Message of a rank to the others: fixed sizes, since it travels as one tensor."""

    host: bytes
    uuid: str
    handle: bytes
    offset: int

    def packed(self) -> Tensor:
        uuid = self.uuid.encode().ljust(_UUID_BYTES, b"\0")
        words = self.host + uuid + self.handle + self.offset.to_bytes(8, "little")
        return torch.frombuffer(bytearray(words), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, packed: Tensor) -> "_Offer":
        words = bytes(packed.tolist())
        ends = (_DIGEST_BYTES, _DIGEST_BYTES + _UUID_BYTES, _DIGEST_BYTES + _UUID_BYTES + HANDLE_BYTES)
        return cls(
            host=words[: ends[0]],
            uuid=words[ends[0] : ends[1]].rstrip(b"\0").decode(),
            handle=words[ends[1] : ends[2]],
            offset=int.from_bytes(words[ends[2] :], "little"),
        )


_NOTHING: Final = _Offer(bytes(_DIGEST_BYTES), "", bytes(HANDLE_BYTES), 0)


def share_memory(
    group: TensorParallelGroup,
    num_words: int,
    device: torch.device,
    *,
    driver: Callable[[], Driver] = CudaDriver,
    missing: Callable[[str, str], str | None] = missing_between,
) -> PeerMemory | str:
    """A share of this many 4-byte words on each rank's device, zeros; or the reason why there is none, for the log.

    All ranks of the group call this together and come to the same answer. Raises `ReplicaError` if a rank is lost.
    """
    share = torch.zeros(num_words * _WORD_BYTES, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the zeros are there before another rank sets a flag
    reason, offer, calls = "", _NOTHING, None
    try:
        calls = driver()
        handle, offset = calls.offer(share.data_ptr())
        offer = _Offer(_host(), _uuid(device), handle, offset)
    except OSError as error:
        reason = str(error)
    offers = [_Offer.unpacked(row) for row in group.all_gather(offer.packed()[None], dim=0)]
    memory = None
    if calls is not None and not reason:
        try:
            memory = _opened(calls, offers, group.rank, share, missing)
        except OSError as error:
            reason = str(error)
    if bool(group.all_gather(torch.tensor([int(memory is not None)]), dim=0).all()):
        assert memory is not None, "this rank has it as well"
        return memory
    if memory is not None:
        memory.release()
    return reason or "another rank cannot"


def _opened(
    calls: Driver, offers: list[_Offer], rank: int, share: Tensor, missing: Callable[[str, str], str | None]
) -> PeerMemory:
    """Takes up the offers of the others. Raises OSError where one cannot be used."""
    if any(offer.host != offers[0].host or offer == _NOTHING for offer in offers):
        raise OSError("they are not on one host")
    opened: list[int] = []

    def release() -> None:
        for address in opened:
            calls.close(address)

    addresses = []
    try:
        for peer, offer in enumerate(offers):
            if peer == rank:
                addresses.append(share.data_ptr())
                continue
            is_other = offer.uuid != offers[rank].uuid  # ranks on one device do, for tests
            if is_other and (what := missing(offers[rank].uuid, offer.uuid)) is not None:
                raise OSError(f"the link of the devices of ranks {rank} and {peer} has no {what}")
            opened.append(calls.open(offer.handle))
            addresses.append(opened[-1] + offer.offset)
    except OSError:
        release()
        raise
    return PeerMemory(tuple(addresses), share, release)


def _host() -> bytes:
    """Names this boot of this machine. Raises OSError where it has no name."""
    return sha256(_BOOT_ID.read_bytes()).digest()


def _uuid(device: torch.device) -> str:
    """A device's name in NVML, where a slice of a GPU has none: slices share no memory. Raises OSError if a device is
    so small that a program might wait for one that has no room to run.
    """
    if device.type != "cuda":
        return "none"
    properties = torch.cuda.get_device_properties(device)
    if (count := properties.multi_processor_count) < PROGRAMS.value:
        raise OSError(f"the device has {count} multiprocessors, and {PROGRAMS.value} programs wait at a time")
    return f"GPU-{properties.uuid}"
