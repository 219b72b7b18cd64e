"""Server process: one driver, as the runner sees it. Started, asked, paused while others are measured, and ended.

The protocol is that of `drivers/line_server.py`. A server leads a process group of its own, so that pausing and ending
reach its children too, and its memory and its share of the cores can be measured apart.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from benchmarks.peers.machine import NoiseWatch, Usage, peak_memory_mib

_END_S: Final = 10.0
_IDLE: Final = 0.02
"""Share of the cores that a server may take and yet have nothing to do."""
_CHUNK: Final = 1 << 16


class ServerError(Exception):
    """A server that died, is too late, or answered with an error."""

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(f"{server}: {reason}")
        self.server = server


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server gave for one burst."""

    ids: list[list[int]]
    seconds: float
    """On the server's own clock, without the pipe."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of its parts (prefill, decode), where it tells them."""
    usage: Usage


class Server:
    """A running driver. It is paused except while it answers, so that its idle threads disturb nobody."""

    def __init__(
        self, name: str, command: Sequence[str | Path], variables: Mapping[str, str], log: Path, limit_s: float = 600.0
    ) -> None:
        self.name = name
        self._log, self._limit_s = log, limit_s
        self._unread = b""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=variables,
                start_new_session=True,
            )
        self._is_paused = False
        self.apis: dict[str, str] = {}
        """Its addresses on a network by protocol, once it is ready: `http`, and `grpc` for ours."""

    @property
    def group(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def await_ready(self) -> dict[str, str]:
        """Waits until the model is loaded. Returns the versions of its packages."""
        said = self._read()
        self.apis = said.get("apis", {})
        versions: dict[str, str] = said.get("versions", {})
        return versions

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While others ask it at its APIs."""
        self._resume()
        try:
            yield
        finally:
            self.pause()

    def ask(
        self,
        case: str,
        prompts: list[list[int]],
        max_tokens: int,
        *,
        split: bool = False,
        sampling: Mapping[str, float | str] = MappingProxyType({}),
    ) -> Answer:
        """Raises `ServerError` if there is no answer, or another number of tokens than was asked for."""
        request = {"case": case, "prompts": prompts, "max_tokens": max_tokens, "split": split}
        request["sampling"] = dict(sampling)
        line = (json.dumps(request) + "\n").encode()
        self._resume()
        watch = NoiseWatch(self.group)
        try:
            self._write(line)
            answer = self._read()
            usage = watch.usage()
        finally:
            self.pause()
        if [len(ids) for ids in answer["ids"]] != [max_tokens] * len(prompts):
            lengths = sorted({len(ids) for ids in answer["ids"]})
            wanted = f"{len(prompts)} x {max_tokens} tokens"
            raise ServerError(self.name, f"asked for {wanted}, gave {len(answer['ids'])} of lengths {lengths}")
        return Answer(ids=answer["ids"], seconds=answer["seconds"], parts=answer.get("parts", {}), usage=usage)

    def idle_share(self, seconds: float = 0.5, limit_s: float = 5.0) -> float:
        """Share of the cores that it takes while it has nothing to do, once what follows its start is done."""
        self._resume()
        deadline_s = time.monotonic() + limit_s
        while True:
            watch = NoiseWatch(self.group)
            time.sleep(seconds)
            share = watch.usage().ours
            if share < _IDLE or time.monotonic() > deadline_s:
                break
        self.pause()
        return share

    def peak_memory_mib(self) -> int:
        return peak_memory_mib(self.group)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)
        self._is_paused = True

    def close(self) -> None:
        """Ends it and all it has started. Safe to call twice."""
        self._resume()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _resume(self) -> None:
        if self._is_paused:
            self._signal(signal.SIGCONT)
            self._is_paused = False

    def _signal(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, which)

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def _read(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + self._limit_s
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise ServerError(self.name, f"no answer in {self._limit_s:.0f} s; see {self._log}")
            chunk = os.read(self._process.stdout.fileno(), _CHUNK)
            if not chunk:
                raise self._ended()
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ServerError(self.name, answer["error"])
        return answer

    def _ended(self) -> ServerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        tail = self._log.read_text(errors="replace").strip().splitlines()[-3:]
        return ServerError(self.name, f"has ended ({self._process.poll()}); {self._log} ends: {' | '.join(tail)}")
