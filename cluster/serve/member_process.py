"""Process of a router or replica: its traces, and its self-termination when memory has run out, on SIGTERM, and when
its replica has failed.

Traces go by OTLP over HTTP,
with the packages of `holdfast[otlp]`: so no second set of channels lives in processes whose own gRPC is busy.

After a failed allocation a process is in an unknown state, and even reporting may fail. Routers and replicas hold
nothing that others cannot rebuild, so the whole process ends.
"""

import asyncio
import errno
import faulthandler
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, MutableMapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TypeVar

from holdfast.worker.config import TelemetryConfig
from holdfast.worker.errors import ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

EXIT_CODE: Final = 1

_NO_THREAD: Final = "can't start new thread"
"""Python's message where there is no memory for another stack."""


class ProcessEnd:
    """Ends this process on request. Its thread is started in advance: a process without memory cannot start one."""

    def __init__(self, last_words: Callable[[], object]) -> None:
        """`last_words` is called once, on that thread, before the process ends; it must not take long."""
        self._last_words = last_words
        self._reasons: queue.SimpleQueue[HoldfastError] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="process-end", daemon=True).start()

    def because(self, error: HoldfastError) -> None:
        """Ends the process with a reason, from any thread. Returns at once; of several reasons the first one counts."""
        self._reasons.put(error)

    def _wait(self) -> None:
        error = self._reasons.get()
        try:
            logger.error("this process ends: %s", error)
            self._last_words()
        finally:
            os._exit(EXIT_CODE)


def end_when_out_of_memory(last_words: Callable[[], object] = lambda: None) -> None:
    """Ends this process, as if killed, when an out-of-memory error is logged or ends a thread. `last_words` is called
    before; it must need no memory.

    Unforeseen errors are always logged, here as in gRPC and asyncio: the log is the one place that sees them all,
    whatever its level. Not for libraries: they must not end their caller's process.
    """
    make, hook = logging.getLogRecordFactory(), threading.excepthook

    def end_or_make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.exc_info:
            _end_if_out_of_memory(record.exc_info[1], last_words)
        return record

    def end_or_pass_on(raised: threading.ExceptHookArgs) -> None:
        _end_if_out_of_memory(raised.exc_value, last_words)
        hook(raised)

    logging.setLogRecordFactory(end_or_make)
    threading.excepthook = end_or_pass_on


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation of Python's or the system's failed. What torch cannot allocate fails its engine anyway."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_THREAD in str(error))


def _end_if_out_of_memory(error: BaseException | None, last_words: Callable[[], object]) -> None:
    if error is None or not is_out_of_memory(error):
        return
    try:
        last_words()
        os.write(2, b"out of memory: this process ends\n")
    finally:  # the disk of the log may be full
        os._exit(EXIT_CODE)


def end_on_sigterm(end: Callable[[], Coroutine[object, object, None]], limit_s: float) -> None:
    """Awaits `end` on the running event loop at the first SIGTERM, for at most `limit_s` seconds, and exits.

    Ray keeps the main thread of an actor on asyncio inside of compiled code, where no handler written in Python ever
    runs. `faulthandler` has one in C, which can be put in place from any thread: the trace that it writes is the news.
    """
    loop = asyncio.get_running_loop()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # a handler must not wait, however many signals come
    faulthandler.register(signal.SIGTERM, file=write_end, all_threads=False)

    def wait() -> None:
        os.read(read_end, 1)
        logger.warning("SIGTERM: this process ends")
        try:
            asyncio.run_coroutine_threadsafe(end(), loop).result(limit_s)
        finally:
            os._exit(0)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


NUM_PORTS: Final = 64
"""Ports that are tried in turn: several replicas may share a machine."""

Bound = TypeVar("Bound")


def on_first_free(bind: Callable[[int], Bound], host: str, port: int, setting: str) -> Bound:
    """Result of `bind` for the first port from `port` on that it does not refuse by `OSError` or `RuntimeError`; 0 is
    any free port. Raises `ConfigurationError`, which names the setting.
    """
    error: OSError | RuntimeError | None = None
    for candidate in range(port, port + NUM_PORTS) if port else (0,):
        try:
            return bind(candidate)
        except (OSError, RuntimeError) as taken:
            error = taken
    raise ConfigurationError(f"{setting} = {port}: none of {NUM_PORTS} ports on {host} is free ({error})")


VARIABLE: Final = "GRPC_EXPERIMENTS"
ON_ONE_THREAD: Final = "-event_engine_client"
LAST_KNOWN: Final = (1, 85)
"""Latest gRPC (major, minor) whose names are known: a later one may not know the name, and would complain about it."""


def read_on_one_thread(environ: MutableMapping[str, str], installed: str = "") -> None:
    """Has processes with this environment read with the thread that completes calls, as gRPC did for years.

    Else a pool of threads reads, which wake one another several times for each message: 4 to 11 % of a router's CPU.
    Variables that are already set keep their values. `installed` is the version of gRPC, as it calls itself.
    """
    major, minor = map(int, (installed or version("grpcio")).split(".")[:2])
    if (major, minor) <= LAST_KNOWN:
        environ.setdefault(VARIABLE, ON_ONE_THREAD)


SCOPE: Final = "holdfast"
TRACES_PATH: Final = "/v1/traces"


def tracer_provider(telemetry: TelemetryConfig, role: str, member_id: str) -> "TracerProvider | None":
    """Tracer provider of this process; None if tracing is off. `role` is "router" or "replica".

    Callers with a `traceparent` are traced, and a share of the others. Raises `ConfigurationError` if packages are
    missing, or the endpoint is invalid.
    """
    if telemetry.otlp_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as missing:
        raise ConfigurationError(
            f"telemetry.otlp_endpoint = {telemetry.otlp_endpoint!r}: traces need packages that are not installed "
            f"({missing.name}); pip install 'holdfast[otlp]'"
        ) from None
    resource = Resource.create({"service.name": f"holdfast-{role}", "service.instance.id": member_id})
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(telemetry.trace_share)), resource=resource)
    endpoint = telemetry.otlp_endpoint.rstrip("/") + TRACES_PATH
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
