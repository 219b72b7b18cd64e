"""Tracing of a cluster's processes: OpenTelemetry's SDK and an exporter by OTLP over HTTP, where a setting asks for it.

The packages are those of `holdfast[otlp]`, imported when they are asked for. HTTP rather than gRPC: so no second set of
channels lives in processes whose own gRPC is busy.
"""

from typing import TYPE_CHECKING, Final

from holdfast.worker.config import TelemetryConfig
from holdfast.worker.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SCOPE: Final = "holdfast"
TRACES_PATH: Final = "/v1/traces"


def tracer_provider(telemetry: TelemetryConfig, role: str, member_id: str) -> "TracerProvider | None":
    """Of this process; None where nothing is traced. `role` is "router" or "replica".

    Callers that say so by `traceparent` are followed, of the others a share. Raises `ConfigurationError` where the
    packages are missing, or the endpoint is none.
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
