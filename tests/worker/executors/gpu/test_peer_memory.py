"""Ranks come to share memory, or find together why not: over fakes of the CUDA driver and of NVML."""

import ctypes

import pytest
import torch

pytest.importorskip("triton")

from holdfast.worker.executors.gpu import peer_memory
from holdfast.worker.executors.gpu.peer_memory import HANDLE_BYTES, CudaDriver, missing_between, share_memory
from tests.fake_group import run_ranks

CPU = torch.device("cpu")


class Driver:
    """Processes of one address space: a handle is the address of an allocation, shifted."""

    def __init__(self):
        self.opened, self.closed = [], []

    def offer(self, address):
        return (address - 512).to_bytes(HANDLE_BYTES, "little"), 512

    def open(self, handle):
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, address):
        self.closed.append(address)


def shared(size, drivers, missing=lambda one, other: None):
    def work(group):
        memory = share_memory(group, 100, CPU, driver=lambda: drivers[group.rank], missing=missing)
        return memory if isinstance(memory, str) else (memory.addresses, memory.own.data_ptr(), memory)

    return run_ranks(size, work)


def test_every_rank_finds_every_share():
    drivers = [Driver() for _ in range(4)]
    found = shared(4, drivers)
    shares = tuple(own for _, own, _ in found)
    for rank, (addresses, _, memory) in enumerate(found):
        assert addresses == shares
        assert not memory.own.any()
        memory.release()
        assert sorted(drivers[rank].closed) == sorted(drivers[rank].opened)
        assert len(drivers[rank].opened) == 3


class Refusing(Driver):
    """Does not open what another process offers, as in another namespace of processes."""

    def open(self, handle):
        if self.opened:
            raise OSError("cuIpcOpenMemHandle_v2 failed with error 201 of the CUDA driver")
        return super().open(handle)


class NotOffering(Driver):
    """As for memory of expandable segments."""

    def offer(self, address):
        raise OSError("cuIpcGetMemHandle failed with error 1 of the CUDA driver")


def test_one_rank_that_cannot_ends_it_for_all():
    drivers = [Driver(), Refusing(), Driver()]
    first, second, third = shared(3, drivers)
    assert second == "cuIpcOpenMemHandle_v2 failed with error 201 of the CUDA driver"
    assert first == third == "another rank cannot"
    assert all(driver.closed == driver.opened for driver in drivers), "what was opened is given back"
    first, second = shared(2, [Driver(), NotOffering()])
    assert second == "cuIpcGetMemHandle failed with error 1 of the CUDA driver"
    assert first == "they are not on one host"


def test_ranks_of_two_hosts_share_nothing(monkeypatch):
    hosts = iter([b"a" * 32, b"b" * 32])
    monkeypatch.setattr(peer_memory, "_host", lambda: next(hosts))
    assert set(shared(2, [Driver(), Driver()])) == {"they are not on one host"}


def test_links_without_atomic_operations_are_not_used(monkeypatch):
    uuids = iter(["GPU-a", "GPU-b"])
    monkeypatch.setattr(peer_memory, "_uuid", lambda device: next(uuids))
    found = shared(2, [Driver(), Driver()], lambda one, other: "atomic operations")
    assert found == [
        f"the link of the devices of ranks {rank} and {1 - rank} has no atomic operations" for rank in (0, 1)
    ]


def test_a_machine_without_a_driver_says_so():
    def none():
        raise OSError("libcuda.so.1: cannot open shared object file")

    found = run_ranks(2, lambda group: share_memory(group, 100, CPU, driver=none))
    assert found == ["libcuda.so.1: cannot open shared object file"] * 2


def test_a_device_too_small_for_all_programs_is_not_used(monkeypatch):
    small = type("Properties", (), {"multi_processor_count": 16, "uuid": "0"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    with pytest.raises(OSError, match="16 multiprocessors, and 64 programs"):
        peer_memory._uuid(torch.device("cuda", 0))


class Function:
    """Of a C library, which ctypes would call with converted arguments."""

    def __init__(self, call):
        self._call = call

    def __call__(self, *arguments):
        return self._call(*arguments)


class Cuda:
    """The driver's functions, over one allocation at 4096 of 1,000 bytes; 77 where another process has it."""

    def __init__(self, status=0):
        self.calls, self.status = [], status
        self.cuIpcOpenMemHandle_v2 = Function(self._open)

    def cuMemGetAddressRange_v2(self, base, size, address):
        base._obj.value, size._obj.value = 4096, 1000
        self.calls.append(("range", address.value))
        return self.status

    def cuIpcGetMemHandle(self, handle, base):
        ctypes.memset(handle, 0, HANDLE_BYTES)
        ctypes.memmove(handle, b"\1\0\2", 3)
        self.calls.append(("handle", base.value))
        return 0

    def _open(self, address, handle, flags):
        address._obj.value = 77
        self.calls.append(("open", bytes(handle), flags))
        return self.status

    def cuIpcCloseMemHandle(self, address):
        self.calls.append(("close", address.value))
        return 0


def test_calls_of_the_driver():
    """A handle is of a whole allocation, has zeros inside, and peers' access is turned on as it is opened."""
    library = Cuda()
    driver = CudaDriver(library)
    handle, offset = driver.offer(4096 + 256)
    assert (handle, offset) == (b"\1\0\2".ljust(HANDLE_BYTES, b"\0"), 256)
    assert driver.open(handle) == 77
    driver.close(77)
    assert library.calls == [("range", 4352), ("handle", 4096), ("open", handle, 1), ("close", 77)]
    with pytest.raises(OSError, match="cuIpcOpenMemHandle_v2 failed with error 5"):
        CudaDriver(Cuda(status=5)).open(handle)


class Nvml:
    """Devices whose links have what `links` says: 0 is there."""

    def __init__(self, links=(0, 0, 0, 0), unknown=""):
        self.links, self.unknown, self.users = links, unknown, 0

    def nvmlInit_v2(self):
        self.users += 1
        return 0

    def nvmlShutdown(self):
        self.users -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        handle._obj.value = 1
        return 6 if uuid.value.decode() == self.unknown else 0

    def nvmlDeviceGetP2PStatus(self, one, other, index, status):
        status._obj.value = self.links[index.value]
        return 0


def test_links_as_nvml_tells():
    assert missing_between("GPU-a", "GPU-b", Nvml()) is None
    assert missing_between("GPU-a", "GPU-b", Nvml((0, 0, 1, 0))) is None, "PCIe does as well, with atomic operations"
    assert missing_between("GPU-a", "GPU-b", Nvml((0, 0, 0, 1))) == "atomic operations"
    assert missing_between("GPU-a", "GPU-b", Nvml((1, 0, 0, 0))) == "reads"
    nvml = Nvml(unknown="GPU-b")
    with pytest.raises(OSError, match="NVML's device GPU-b failed with error 6"):
        missing_between("GPU-a", "GPU-b", nvml)
    assert nvml.users == 0
