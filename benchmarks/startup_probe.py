"""Probe of a start, run with `python -c` in the tree that is measured: a stopwatch around the parts of a start."""

import time

ENTERED_NS = time.monotonic_ns()

import builtins  # noqa: E402
import contextlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402

WRAPPED = (
    ("holdfast.cluster.commands.generate", "load_config", "settings"),
    ("holdfast.worker.models.loading", "read_config", "config"),
    ("holdfast.worker.models.loading", "load_backend", "weights"),
    ("holdfast.worker.models.backend", "read_config", "config"),
    ("holdfast.worker.models.backend", "build_rank_model", "weights"),
    ("holdfast.worker.models.native_backend", "ask_reference", "proof"),
    ("holdfast.worker.models.native_backend", "check", "proof"),
    ("holdfast.worker.executors.cpu.executor", "PackedModel", "packing"),
    ("holdfast.worker.models.loading", "_allocate_cache", "cache"),
    ("holdfast.worker.engine.model_runner", "_self_check", "self-check"),
    ("holdfast.cluster.offline.inference_engine", "LocalRouter.start", "router"),
)
"""Module, name in it, phase. What a tree does not have is left out."""


class Stopwatch:
    """The main thread's time by phase, without the phases inside."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = time.perf_counter()
        self._thread = threading.main_thread()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if threading.current_thread() is not self._thread:
            yield
            return
        self._book()
        self._stack.append(name)
        try:
            yield
        finally:
            self._book()
            self._stack.pop()

    def _book(self) -> None:
        now = time.perf_counter()
        if self._stack:
            name = self._stack[-1]
            self.times[name] = self.times.get(name, 0.0) + 1000 * (now - self._since)
        self._since = now


WATCH = Stopwatch()
DEPTH = threading.local()


def timed(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with WATCH.phase(phase):
            return function(*args, **kwargs)

    return call


def importing(function: Callable[..., Any]) -> Callable[..., Any]:
    """An import function whose outermost calls are a phase."""

    def load(*args: Any, **kwargs: Any) -> Any:
        depth = getattr(DEPTH, "value", 0)
        if depth:
            return function(*args, **kwargs)
        DEPTH.value = 1
        try:
            with WATCH.phase("imports"):
                return function(*args, **kwargs)
        finally:
            DEPTH.value = 0
            wrap_what_is_there()

    return load


DONE: set[tuple[str, str]] = set()


def wrap_what_is_there() -> None:
    for module_name, name, phase in WRAPPED:
        owner: Any = sys.modules.get(module_name)
        *path, attribute = name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        if (module_name, name) not in DONE and hasattr(owner, attribute):
            DONE.add((module_name, name))
            setattr(owner, attribute, timed(getattr(owner, attribute), phase))


def peak_mb() -> float:
    """The most memory that this process has had resident."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def report(*_: object) -> None:
    """At the first token: what the start took so far."""
    total = (time.monotonic_ns() - BEGUN_NS) / 1e6
    times = {
        **WATCH.times,
        "interpreter": (ENTERED_NS - BEGUN_NS) / 1e6,
        "first step": 1000 * (time.perf_counter() - READY[0]),
        "total": total,
        "cpu": 1000 * time.process_time(),
        "peak": peak_mb(),
    }
    print("startup: " + json.dumps(times), file=sys.stderr, flush=True)


READY = [0.0]
BEGUN_NS = int(sys.argv[1])
del sys.argv[1]
sys.argv[0] = "holdfast"
builtins.__import__ = importing(builtins.__import__)
importlib.import_module = importing(importlib.import_module)

from holdfast.cluster.commands import cli  # noqa: E402
from holdfast.cluster.commands.generate import Printer  # noqa: E402

make_printer, add = Printer.__init__, Printer.add


def made(self: Printer) -> None:
    READY[0] = time.perf_counter()  # the model is loaded: what follows is the request
    make_printer(self)


def added(self: Printer, text: str, num_tokens: int) -> None:
    if self._num_tokens == 0:
        report()
    add(self, text, num_tokens)


Printer.__init__, Printer.add = made, added  # type: ignore[method-assign]
cli.main()
