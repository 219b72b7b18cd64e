"""ORCA load reports: the router's load, in a trailer of each gRPC call and a header of HTTP responses that ask for it.

gRPC's weighted round robin reads `application_utilization`, `rps_fractional` and `eps`. Over HTTP a request asks by
`endpoint-load-metrics-format`, as vLLM and gateways have it.
"""

import json
from collections import deque
from typing import Final

from holdfast.foreign import orca_load_report_pb2
from holdfast.router.dispatch.dispatch_host import DispatchHost

TRAILER: Final = "endpoint-load-metrics-bin"
HEADER: Final = "endpoint-load-metrics"
ASKED_BY: Final = "endpoint-load-metrics-format"

FRESH_S: Final = 0.1
"""A report is made once in so long, however many calls end."""

RATE_WINDOW_S: Final = 10.0


class LoadReports:
    """Load reports of one router."""

    def __init__(self, dispatch_host: DispatchHost) -> None:
        self._dispatch_host = dispatch_host
        self._num_calls = self._num_errors = 0
        self._samples: deque[tuple[float, int, int]] = deque([(dispatch_host.now(), 0, 0)])
        """Time, calls and errors until then: one for each report of the last seconds."""
        self._trailers: tuple[tuple[str, bytes], ...] = ()
        self._made = orca_load_report_pb2.OrcaLoadReport()
        self._made_at = -FRESH_S

    def trailers(self, *, is_error: bool = False) -> tuple[tuple[str, bytes], ...]:
        """Trailers of a call that ends now."""
        self._num_calls += 1
        self._num_errors += is_error
        self._refresh()
        return self._trailers

    def header(self, asked: str) -> dict[str, str]:
        """Header of an HTTP response whose request asks for the format `asked`: `TEXT` or `JSON`; empty for another."""
        asked = asked.strip().upper()
        if asked not in ("TEXT", "JSON"):
            return {}
        self._refresh()
        figures = {
            "application_utilization": self._made.application_utilization,
            "rps_fractional": self._made.rps_fractional,
            "eps": self._made.eps,
        }
        if asked == "JSON":
            return {HEADER: f"JSON {json.dumps({**figures, 'named_metrics': dict(self._made.named_metrics)})}"}
        named = {f"named_metrics.{name}": value for name, value in self._made.named_metrics.items()}
        return {HEADER: "TEXT " + ", ".join(f"{name}={value:g}" for name, value in (figures | named).items())}

    def _refresh(self) -> None:
        now = self._dispatch_host.now()
        if now - self._made_at >= FRESH_S:
            self._made_at = now
            self._made = self._report(now)
            self._trailers = ((TRAILER, self._made.SerializeToString()),)

    def _report(self, now: float) -> orca_load_report_pb2.OrcaLoadReport:
        loads = [replica.load for replica in self._dispatch_host.dispatch.loads()]
        num_blocks = sum(load.num_total_blocks for load in loads)
        num_free = sum(load.num_free_blocks for load in loads)
        kv_usage = 1 - num_free / num_blocks if num_blocks else 0.0
        num_waiting = self._dispatch_host.dispatch.num_queued + sum(load.num_waiting for load in loads)
        num_running = sum(load.num_running for load in loads)
        calls_per_s, errors_per_s = self._rates(now)
        return orca_load_report_pb2.OrcaLoadReport(
            rps_fractional=calls_per_s,
            eps=errors_per_s,
            # Queued requests exceed the capacity, so that a router with a queue ranks above one that is merely full.
            application_utilization=kv_usage + (num_waiting / num_running if num_running else float(num_waiting)),
            utilization={"kv_cache": kv_usage},
            named_metrics={
                "kv_cache_usage_perc": kv_usage,
                "num_requests_running": num_running,
                "num_requests_waiting": num_waiting,
            },
        )

    def _rates(self, now: float) -> tuple[float, float]:
        """Calls and errors in a second, of the last seconds."""
        self._samples.append((now, self._num_calls, self._num_errors))
        while len(self._samples) > 2 and now - self._samples[1][0] >= RATE_WINDOW_S:
            self._samples.popleft()
        began, num_calls, num_errors = self._samples[0]
        passed_s = max(now - began, FRESH_S)
        return (self._num_calls - num_calls) / passed_s, (self._num_errors - num_errors) / passed_s
