"""Runs of a bench: calibration, warm-up, a run for each load, or a search for the highest one. Composes the parts."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from holdfast.cluster.bench.driver import Driver, LoadLimits, calibrate
from holdfast.cluster.bench.report import Load, Run, Search, Try
from holdfast.cluster.bench.sender import Sender
from holdfast.cluster.bench.summary import Slo, summary
from holdfast.cluster.bench.workload import Arrivals, Calibration, PromptTexts, Session, Workload, traced
from holdfast.cluster.load_trace import Arrival
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.wire.tls import Tls

if TYPE_CHECKING:
    from holdfast.cluster.bench.sender import Sender

_WIDEST: Final = 64
"""Factor below the first load at which the search ends if even that is too much."""


class LoadSearch:
    """Between the highest load that was fine and the lowest that was not.

    It holds for a server that gets no better under more load; where figures scatter, its answer is as good as a single
    try near it.
    """

    def __init__(self, start: float, *, tolerance: float = 0.05, max_tries: int = 12, is_whole: bool = False) -> None:
        """Ends when the two are within `tolerance` of each other, as a share, or after `max_tries`.

        `is_whole`: loads are whole numbers, such as users of a closed loop.
        """
        self._start = start
        self._tolerance = tolerance
        self._left = max_tries
        self._is_whole = is_whole
        self.best: float | None = None
        """The highest load that was fine so far; None: none was."""
        self.lowest_bad: float | None = None

    def next(self) -> float | None:
        """The load to try; None: the search is over."""
        if self._left == 0:
            return None
        if self.best is None and self.lowest_bad is None:
            return self._rounded(self._start)
        if self.lowest_bad is None:
            assert self.best is not None
            return self._rounded(self.best * 2)
        if self.best is None:
            below = self._rounded(self.lowest_bad / 2)
            return below if below < self.lowest_bad and below * _WIDEST >= self._start else None
        if self.lowest_bad <= self.best * (1 + self._tolerance):
            return None
        middle = self._rounded((self.best + self.lowest_bad) / 2)
        return middle if self.best < middle < self.lowest_bad else None

    def note(self, load: float, *, is_fine: bool) -> None:
        """Notes the outcome of one load. A load above a failed one is assumed to fail as well."""
        self._left -= 1
        if is_fine and (self.lowest_bad is None or load < self.lowest_bad):
            self.best = load if self.best is None else max(self.best, load)
        elif not is_fine:
            self.lowest_bad = load if self.lowest_bad is None else min(self.lowest_bad, load)

    def _rounded(self, load: float) -> float:
        return max(1.0, float(round(load))) if self._is_whole else load


_NUMBERS_PER_RUN: Final = 1 << 24
"""Sessions of different runs have different numbers, and so different texts: no run finds another's in the cache."""
_WARMUP_AT_A_TIME: Final = 8  # requests

OnChange = Callable[[int, int], None]
Watch = Callable[[str, int | None, float | None], AbstractContextManager[OnChange]]
"""`watch(title, num_sessions, duration_s)`: shows a run's progress while the block lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a bench run."""

    workload: Workload
    trace: Sequence[Arrival] | None = None
    trace_speed: float = 1.0
    concurrency: tuple[int, ...] = ()
    num_agents: int | None = None
    """Sessions of an `AgentWorkload`, all open at once."""
    arrivals: tuple[Arrivals, ...] = ()
    num_sessions: int | None = None
    duration_s: float | None = None
    """Seconds during which sessions begin."""
    warmup: int = 0
    think_s: float = 0.0
    timeout_s: float | None = None
    max_in_flight: int = 4096
    slo: Slo | None = None
    attainment: float = 0.95
    find_max: bool = False
    max_tries: int = 12
    text_seed: int = 0


class Bench:
    """One bench on one server."""

    def __init__(
        self, plan: Plan, sender: Sender, watch: Watch, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`clock` is the drivers' own."""
        self._clock = clock
        self._plan = plan
        self._sender = sender
        self._watch = watch
        self._num_runs = 0
        self.runs: list[Run] = []
        self.search: Search | None = None
        self.calibration = Calibration()

    async def prepare(self) -> None:
        """Raises `ConfigurationError` for a server that does not answer."""
        self.calibration = await calibrate(self._sender, self._plan.text_seed)
        self._texts = PromptTexts(self._plan.text_seed, self.calibration)
        if self._plan.warmup:
            limits = self._limits(concurrency=min(self._plan.warmup, _WARMUP_AT_A_TIME), is_timed=False)
            sessions = islice(self._sessions(), self._plan.warmup)
            await self._warm_up(sessions, limits)

    async def _warm_up(self, sessions: Iterator[Session], limits: LoadLimits) -> None:
        self._num_runs += 1
        total = self._plan.workload.num_requests(self._plan.warmup)
        with self._watch("warm-up", total, limits.duration_s) as on_change:
            await Driver(self._sender, self._texts, limits, on_change, self._clock).run(sessions)

    async def run(self) -> None:
        """All runs, or the search. Completed runs are in `runs` from then on, even if a later one fails.

        When it is cancelled, it ends; the requests of the last run that had ended are in `runs` too.
        """
        plan = self._plan
        if plan.find_max:
            await self._find_max()
            return
        for concurrency in plan.concurrency:
            await self._closed(concurrency)
        for arrivals in plan.arrivals:
            await self._open(arrivals)
        if plan.trace is not None:
            await self._traced(plan.trace)
        if plan.num_agents is not None:
            await self._agents(plan.num_agents)

    # --- one run each ---

    async def _closed(self, concurrency: int) -> Run:
        load = Load(kind="closed", concurrency=concurrency)
        sessions = islice(self._sessions(), self._plan.num_sessions)
        return await self._measured(load, sessions, self._limits(concurrency=concurrency), self._plan.num_sessions)

    async def _open(self, arrivals: Arrivals) -> Run:
        load = Load(
            kind="open",
            rate=arrivals.rate,
            arrivals=arrivals.process,
            burstiness=arrivals.burstiness if arrivals.process == "gamma" else None,
        )
        plan = self._plan
        times: Iterator[float] = arrivals.times(plan.workload.seed)
        if plan.duration_s is not None:
            limit_s = plan.duration_s
            times = takewhile(lambda time_s: time_s < limit_s, times)
        due = list(islice(times, plan.num_sessions))
        if not due:
            raise ConfigurationError(
                f"--rate {arrivals.rate:g} --duration {plan.duration_s:g}: no request is due in it"
            )
        pairs = zip(self._sessions(), due, strict=False)
        sessions = (Session(session.number, session.turns, due_s) for session, due_s in pairs)
        is_cut_by_time = plan.num_sessions is None or len(due) < plan.num_sessions
        return await self._measured(
            load, sessions, self._limits(), len(due), plan.duration_s if is_cut_by_time else None
        )

    async def _traced(self, trace: Sequence[Arrival]) -> Run:
        plan = self._plan
        every = traced(trace, plan.trace_speed, self._first_number())
        sessions = [one for one in every if plan.duration_s is None or one.start_s < plan.duration_s]
        sessions = sessions[: plan.num_sessions]
        span_s = sessions[-1].start_s
        load = Load(kind="trace", rate=len(sessions) / span_s if span_s else None)
        return await self._measured(load, iter(sessions), self._limits(), len(sessions))

    async def _agents(self, num_agents: int) -> Run:
        sessions = sorted(islice(self._sessions(), num_agents), key=lambda session: session.start_s)
        load = Load(kind="agents", concurrency=num_agents)
        return await self._measured(load, iter(sessions), self._limits(), num_agents)

    async def _measured(
        self,
        load: Load,
        sessions: Iterator[Session],
        limits: LoadLimits,
        total: int | None,
        sending_s: float | None = None,
    ) -> Run:
        """Cancelled, it leaves a run of the requests that are over by then, if there are any."""
        self._num_runs += 1
        if total is not None:
            total = self._plan.workload.num_requests(total)
        with self._watch(str(load), total, limits.duration_s) as on_change:
            driver = Driver(self._sender, self._texts, limits, on_change, self._clock)
            try:
                records = await driver.run(sessions)
            except asyncio.CancelledError:
                if driver.ended:
                    self.runs.append(summary(load, driver.ended, self._plan.slo, is_interrupted=True))
                raise
        self.runs.append(summary(load, records, self._plan.slo, sending_s))
        return self.runs[-1]

    # --- the search ---

    async def _find_max(self) -> None:
        plan = self._plan
        is_closed = bool(plan.concurrency)
        start = float(plan.concurrency[0]) if is_closed else plan.arrivals[0].rate
        search = LoadSearch(start, max_tries=plan.max_tries, is_whole=is_closed)
        tries: list[Try] = []
        while (load := search.next()) is not None:
            run = await (self._closed(int(load)) if is_closed else self._open(self._at(load)))
            attainment = run.attainment or 0.0
            is_fine = attainment >= plan.attainment
            search.note(load, is_fine=is_fine)
            tries.append(Try(load=load, attainment=attainment, is_fine=is_fine))
            self.search = Search(of="concurrency" if is_closed else "rate", best=search.best, tries=tries)

    def _at(self, rate: float) -> Arrivals:
        like = self._plan.arrivals[0]
        return Arrivals(rate=rate, process=like.process, burstiness=like.burstiness)

    # --- what runs share ---

    def _first_number(self) -> int:
        return self._num_runs * _NUMBERS_PER_RUN

    def _sessions(self) -> Iterator[Session]:
        return self._plan.workload.sessions(self._first_number())

    def _limits(self, concurrency: int | None = None, *, is_timed: bool = True) -> LoadLimits:
        plan = self._plan
        given: dict[str, Any] = {"think_s": plan.think_s, "timeout_s": plan.timeout_s}
        if concurrency is not None and is_timed:
            given["duration_s"] = plan.duration_s
        return LoadLimits(concurrency=concurrency, max_in_flight=plan.max_in_flight, **given)


PROTOCOLS: Final = ("chat", "completions", "holdfast", "holdfast-chat", "oip")
_FORMS: Final = "must be http(s)://HOST:PORT, HOST:PORT of holdfast's gRPC, or oip://HOST:PORT"
_OVER_HTTP: Final = ("chat", "completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that requests are sent to."""

    server: str
    """Address without a scheme; HTTP addresses have one."""
    protocol: str

    @classmethod
    def parsed(cls, server: str, protocol: str | None) -> "Target":
        """Raises `ConfigurationError`."""
        if protocol is not None and protocol not in PROTOCOLS:
            raise ConfigurationError(f"--protocol {protocol}: must be among {', '.join(PROTOCOLS)}")
        scheme, found, rest = server.partition("://")
        if not found:
            scheme, rest = "oip" if protocol == "oip" else "grpc", server
        if scheme not in ("http", "https", "grpc", "oip") or not _has_ports(rest, needs_port=scheme[:4] != "http"):
            raise ConfigurationError(f"--server {server}: {_FORMS}")
        is_http = scheme in ("http", "https")
        chosen = protocol or {"grpc": "holdfast", "oip": "oip"}.get(scheme, "completions")
        if is_http != (chosen in _OVER_HTTP) or (scheme == "oip") != (chosen == "oip"):
            raise ConfigurationError(
                f"--protocol {chosen} (with --server {server}): the two do not fit; --server {_FORMS}"
            )
        if is_http and not urlsplit(server).path.strip("/"):
            server = f"{server.rstrip('/')}/v1"
        return cls(server=server.rstrip("/") if is_http else rest, protocol=chosen)

    @property
    def has_conversations(self) -> bool:
        return self.protocol in ("chat", "holdfast-chat")

    async def sender(
        self, model: str, params: Mapping[str, Any], *, api_key: str = "", tls: Tls | None = None
    ) -> "tuple[Sender, str]":
        """On the running event loop; and the model's name for requests. Raises `ConfigurationError`."""
        if self.protocol in _OVER_HTTP:
            from holdfast.cluster.bench.sender import HttpSender

            is_chat = self.protocol == "chat"
            http = HttpSender(self.server, model, is_chat=is_chat, params=params, api_key=api_key, tls=tls)
            try:
                return http, await http.choose_model()
            except ConfigurationError:
                await http.close()
                raise
        if self.protocol == "oip":
            from holdfast.cluster.bench.grpc_senders import OipSender

            return OipSender(self.server, model, params=params, api_key=api_key, tls=tls), model
        from holdfast.cluster.bench.grpc_senders import HoldfastSender
        from holdfast.worker.sampling_params import SamplingParams

        return HoldfastSender(
            self.server.split(","),
            model,
            is_chat=self.has_conversations,
            params=SamplingParams(**params),
            api_key=api_key,
            tls=tls,
        ), model


def _has_ports(text: str, *, needs_port: bool) -> bool:
    try:
        hosts = [urlsplit(f"//{one}") for one in text.split(",")]
        return all(host.hostname and (host.port or not needs_port) for host in hosts)
    except ValueError:
        return False
