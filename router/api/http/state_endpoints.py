"""HTTP endpoints of what a router tells of itself: its models, health, load, metrics, and the view of its cluster."""

from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import Endpoint, json_response
from holdfast.router.api.http.openapi import description
from holdfast.router.api.http.page_files import cluster_view
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import ModelStatus
from holdfast.router.metrics.exposition import ConnectionCounts, exposed, router_samples
from holdfast.router.overload.overload import Overload
from holdfast.router.requests.poison_watch import PoisonWatch
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.worker.errors import ReplicaError
from holdfast.worker.wire.certificates import Certificates


class StateEndpoints:
    """The endpoints, for the application's table of routes."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        dispatch_host: DispatchHost,
        responses: Counter[tuple[str, int]],
        warnings: Callable[[], Sequence[str]],
        is_killable: bool,
        connections: ConnectionCounts | None = None,
        poison_watch: PoisonWatch | None = None,
    ) -> None:
        """`responses` counts them by path and status; `warnings` is what health says besides."""
        self.is_stopping = False
        """Once it is set, health answers 503."""
        self.overload: Overload | None = None
        """Its state is part of health; None: there is none."""
        self.certificates: Certificates | None = None
        """Their expiry is part of health."""
        self._requests = request_processor
        self._dispatch_host = dispatch_host
        self._responses = responses
        self._warnings = warnings
        self._is_killable = is_killable
        self._connections = connections
        self._poison_watch = poison_watch

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("GET", "/health", self.health),
            ("GET", "/ping", self.health),
            ("GET", "/ready", self.health),
            ("GET", "/version", self.version),
            ("GET", "/load", self.load),
            ("GET", "/metrics", self.metrics),
            ("GET", "/cluster", self.cluster),
            ("GET", "/openapi.json", self.openapi),
        ]

    async def models(self, request: Request) -> ASGIApp:
        return json_response({"object": "list", "data": [self._model(model) for model in self._requests.models()]})

    async def model(self, request: Request) -> ASGIApp:
        return json_response(self._model(self._requests.model(request.path_params["model"])))

    def _model(self, model: ModelStatus) -> dict[str, Any]:
        has_template = self._requests.has_chat_template(model.name)
        return {
            "id": model.name,
            "object": "model",
            "created": 0,
            "owned_by": "holdfast",
            "root": model.facts.path,
            "parent": None,
            "max_model_len": model.facts.max_model_len,
            "num_replicas": model.num_replicas,
            "chat_template": "given" if model.facts.chat_template else "own" if has_template else None,
        }

    async def health(self, request: Request) -> ASGIApp:
        """200 while any model has a replica up, with what is wrong all the same."""
        if self.is_stopping or not any(model.takes_requests for model in self._dispatch_host.dispatch.models()):
            raise ReplicaError("no replica is up" if not self.is_stopping else "this router is stopping")
        warnings = self._warnings()
        return json_response({"warnings": list(warnings)}) if warnings else Response()

    async def version(self, request: Request) -> ASGIApp:
        return json_response({"version": version("holdfast")})

    async def load(self, request: Request) -> ASGIApp:
        host = self._dispatch_host
        replicas = [
            {
                "replica_id": replica.replica_id,
                "model": replica.model,
                "num_running": replica.load.num_running,
                "num_waiting": replica.load.num_waiting,
                "num_free_blocks": replica.load.num_free_blocks,
                "num_total_blocks": replica.load.num_total_blocks,
            }
            for replica in host.dispatch.loads()
        ]
        return json_response(
            {"server_load": host.dispatch.num_open, "num_queued": host.dispatch.num_queued, "replicas": replicas}
        )

    async def cluster(self, request: Request) -> ASGIApp:
        return json_response(cluster_view(self._dispatch_host, self.overload, is_killable=self._is_killable))

    async def openapi(self, request: Request) -> ASGIApp:
        return json_response(description())

    async def metrics(self, request: Request) -> ASGIApp:
        samples = router_samples(
            self._requests.stats,
            self._dispatch_host,
            self._responses,
            self._connections,
            self._poison_watch,
            self.overload,
            self.certificates,
        )
        text, media_type = exposed(samples)
        return Response(text, headers={"content-type": media_type})
