"""A fake of the package nixl, with the calls that are made. Its agents are in one process, and read by address."""

import ctypes
import pickle
import sys
import types
from dataclasses import dataclass

Region = tuple[int, int, int]
"""Address, bytes and device."""


class NixlError(RuntimeError):
    """As the native part raises."""


@dataclass
class nixl_agent_config:
    enable_prog_thread: bool = True
    enable_listen_thread: bool = False
    listen_port: int = 0
    backends: tuple[str, ...] = ("UCX",)


@dataclass(eq=False)
class Handle:
    here: list[Region]
    there: list[Region]
    state: str = "NEW"


@dataclass
class Faults:
    """What goes wrong."""

    state: str = "DONE"
    """What a read ends with."""
    can_release: bool = True
    backends: tuple[str, ...] = ("UCX",)


class nixl_agent:
    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config, instantiate_all: bool = False) -> None:
        assert agent_name not in AGENTS, "names are unique"
        self.name = agent_name
        self.backends = {name: 1 for name in nixl_conf.backends if name in FAULTS.backends}
        self.registered: set[Region] = set()
        self.remote: dict[bytes, set[Region]] = {}
        self.num_reads = 0
        AGENTS[agent_name] = self

    def register_memory(self, reg_list, mem_type=None, backends=()) -> list[Region]:
        assert mem_type == "DRAM"
        regions = [(address, size, device) for address, size, device, _ in reg_list]
        self.registered.update(regions)
        return regions

    def deregister_memory(self, dereg_list, backends=()) -> None:
        self.registered.difference_update(dereg_list)

    def get_agent_metadata(self) -> bytes:
        return pickle.dumps((self.name, self.registered))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        try:
            name, regions = pickle.loads(metadata)
        except Exception as error:
            raise NixlError("NIXL_ERR_MISMATCH") from error
        self.remote.setdefault(name.encode(), set()).update(regions)
        return name.encode()

    def remove_remote_agent(self, agent: bytes) -> None:
        del self.remote[agent]

    def get_xfer_descs(self, descs, mem_type=None) -> list[Region]:
        assert mem_type == "DRAM"
        return list(descs)

    def initialize_xfer(self, operation, local_descs, remote_descs, remote_agent, notif_msg=b"", backends=()) -> Handle:
        assert operation == "READ", "no memory of another rank is written to"
        if not all(_is_in(one, self.registered) for one in local_descs):
            raise NixlError("NIXL_ERR_NOT_FOUND: local")
        if not all(_is_in(one, self.remote.get(remote_agent, set())) for one in remote_descs):
            raise NixlError("NIXL_ERR_NOT_FOUND: remote")
        return Handle(local_descs, remote_descs)

    def transfer(self, handle: Handle, notif_msg: bytes = b"") -> str:
        handle.state = "PROC"
        return handle.state

    def check_xfer_state(self, handle: Handle) -> str:
        if FAULTS.state == "DONE" and handle.state == "PROC":
            for (here, size, _), (there, _, _) in zip(handle.here, handle.there, strict=True):
                ctypes.memmove(here, there, size)
            self.num_reads += 1
        handle.state = FAULTS.state
        return handle.state

    def release_xfer_handle(self, handle: Handle) -> None:
        if handle.state == "PROC" and not FAULTS.can_release:
            raise NixlError("NIXL_ERR_REPOST_ACTIVE")
        handle.state = "RELEASED"


AGENTS: dict[str, nixl_agent] = {}
FAULTS = Faults()


def _is_in(region: Region, regions: set[Region]) -> bool:
    address, size, _ = region
    return any(first <= address and address + size <= first + length for first, length, _ in regions)


def install(monkeypatch, **faults) -> None:
    """Makes it the package for a test, with these faults."""
    AGENTS.clear()
    FAULTS.__dict__.update({**Faults().__dict__, **faults})
    package, api = types.ModuleType("nixl"), types.ModuleType("nixl._api")
    api.__dict__.update(nixl_agent=nixl_agent, nixl_agent_config=nixl_agent_config)
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
