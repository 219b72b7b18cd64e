"""Hosts on this machine: each with a network namespace and an address of its own, its own processes and its own files.

A host's first process is what a pod's is: it ends with SIGKILL to it, and everything of the host with it. Hosts stand
on one bridge, where this process reaches them by their addresses. Needs root, and `ip` of iproute2.
"""

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
import pytest

USER: Final = 1000
HOME: Final = "/home/holdfast"
GONE_S: Final = 15.0
STARTED_S: Final = 30.0

_MOUNTS: Final = f"""
hostname {{name}}
mount -t tmpfs tmpfs /run
printf '127.0.0.1 localhost\n{{address}} {{name}}\n' > /run/hosts && mount --bind /run/hosts /etc/hosts
{{opened}}
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777,size={{shm}} tmpfs /dev/shm
mount -t tmpfs tmpfs /home && mkdir {HOME} && chown {USER}:{USER} {HOME}
mount -o remount,ro,bind /
"""
"""What a manifest mounts in a pod; the rest of the files is that of this machine, and cannot be written."""


def _opened() -> str:
    """Mounts that let the user reach interpreter and packages where a folder above them lets in its owner alone."""
    wanted = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, *filter(None, sys.path))}
    closed = {
        path: folder
        for path in sorted(wanted)
        if path.is_dir() and not wanted & set(path.parents)
        for folder in [next((one for one in reversed(path.parents) if not one.stat().st_mode & 0o001), None)]
        if folder is not None
    }
    aside = [f"mkdir -p /run{path}; mount --bind {path} /run{path}" for path in closed]
    open_up = [f"mount -t tmpfs -o mode=755 tmpfs {folder}" for folder in sorted(set(closed.values()))]
    back = [f"mkdir -p {path}; mount --bind /run{path} {path}" for path in closed]
    return "\n".join([*aside, *open_up, *back])


def needs_hosts() -> None:
    """Skips a test where there cannot be any."""
    tools = [name for name in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if sys.platform != "linux" or os.geteuid() != 0 or tools:
        pytest.skip(f"needs Linux, root, and iproute2 and util-linux (missing: {tools or 'root'})")
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"needs namespaces of networks, mounts and processes: {tried.stderr.strip()}")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Host:
    """Its processes end with `kill`, its network with `cut`."""

    name: str
    address: str
    environment: Mapping[str, str]
    link: str
    """The bridge's end of its cable."""
    first: subprocess.Popen[bytes] = field(repr=False)

    def run(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec`, and as kubelet's probes and hooks."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--pid"]
        return subprocess.run(
            [*enter, *_as_user(), *command],
            env=dict(self.environment),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    @property
    def pid(self) -> int:
        """Of its first process, as it is seen from here."""
        (first,) = psutil.Process(self.first.pid).children()
        return int(first.pid)

    @property
    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.first.pid).children(recursive=True)

    def kill(self) -> None:
        """Everything on it, at once."""
        if self.first.poll() is None:
            processes = self.processes
            for process in psutil.Process(self.first.pid).children() or [self.first]:
                process.kill()  # the first process of a namespace takes all others along
            self.first.wait(GONE_S)
            assert psutil.wait_procs(processes, GONE_S)[1] == []

    def cut(self) -> None:
        """From here on nothing reaches it and nothing comes from it, and nobody is told: a black hole."""
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        ip("link", "set", self.link, "up")


def _as_user() -> list[str]:
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]


class Hosts:
    """Made by `hosts`."""

    def __init__(self, bridge: str, subnet: str, logs: Path, stack: ExitStack) -> None:
        self._bridge = bridge
        self._subnet = subnet
        self._logs = logs
        self._stack = stack
        self._numbers = itertools.count(2)

    def start(self, name: str, command: str, environment: Mapping[str, str], shm: str = "256m") -> Host:
        """Runs a command of bash as a user without rights, and again whenever it ends: as kubelet does with containers.

        Ray gives up where a machine is too busy to start a node within half a minute.
        """
        number = next(self._numbers)
        namespace, link = f"{self._bridge}-{number}", f"{self._bridge}v{number}"
        address = f"{self._subnet}.{number}"
        self._connect(namespace, link, address)
        bin_folder = str(Path(sys.executable).parent)
        known = {
            "PATH": f"{bin_folder}:/usr/local/bin:/usr/bin:/bin:/usr/sbin",
            "HOME": HOME,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "LANG": "C.UTF-8",
        } | dict(environment)
        mounts = _MOUNTS.format(shm=shm, opened=_opened(), name=name, address=address)
        script = f'{mounts}\nexec {" ".join(_as_user())} bash -c -- "$COMMAND"'
        isolated = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
        log = self._stack.enter_context((self._logs / f"{name}.log").open("wb"))
        first = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *isolated, "bash", "-ec", script],
            env=known | {"COMMAND": f"while true; do ( {command} ); sleep 1; done"},
            cwd="/",
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
        host = Host(name, address, known, link, first)
        self._stack.callback(host.kill)
        deadline_s = time.monotonic() + STARTED_S
        while not psutil.Process(first.pid).children():
            assert first.poll() is None, f"{name} has ended: see {log.name}"
            assert time.monotonic() < deadline_s, f"{name} does not start: see {log.name}"
            time.sleep(0.02)
        return host

    def next_address(self) -> str:
        """That of the host that is started next."""
        number = next(self._numbers)
        self._numbers = itertools.chain([number], self._numbers)  # type: ignore[assignment]
        return f"{self._subnet}.{number}"

    def _connect(self, namespace: str, link: str, address: str) -> None:
        ip("netns", "add", namespace)
        self._stack.callback(lambda: ip("netns", "del", namespace))
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("link", "set", link, "master", self._bridge, "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "eth0", "up")
        ip("-n", namespace, "route", "add", "default", "via", f"{self._subnet}.1")


@contextmanager
def hosts(logs: Path) -> Iterator[Hosts]:
    """No host yet. Whatever was started has ended afterwards, and its network is gone."""
    bridge, subnet = f"hf{os.getpid() % 100_000}", f"10.213.{os.getpid() % 250}"
    with ExitStack() as stack:
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(lambda: ip("link", "del", bridge))
        ip("address", "add", f"{subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        yield Hosts(bridge, subnet, logs, stack)
