"""HTTP endpoints beside generation: a router's models, health, load, metrics and view of its cluster, and texts as
token ids and back.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import Endpoint, json_response
from holdfast.router.api.http.bodies import DetokenizeBody, TokenizeBody
from holdfast.router.api.http.chat_completions import chat_of
from holdfast.router.api.http.messages import message_request
from holdfast.router.api.http.messages_body import CountBody
from holdfast.router.api.http.openapi import description
from holdfast.router.api.http.page_files import cluster_view
from holdfast.router.api.http.request_reader import RequestReader, tenant_of
from holdfast.router.api.http.response_history import ResponseHistory
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import ModelStatus
from holdfast.router.metrics.exposition import ConnectionCounts, exposed, router_samples, store_samples
from holdfast.router.overload.overload import Overload
from holdfast.router.request import GenerationRequest, naming
from holdfast.router.requests.poison_watch import PoisonWatch
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import InvalidRequestError, ReplicaError
from holdfast.worker.wire.tls import Certificates


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
        """Overload manager, whose state is part of health; None: there is none."""
        self.history: ResponseHistory | None = None
        """Store whose size is part of the metrics."""
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
        """Answers `GET /v1/models`."""
        models = self._requests.models()
        said = [self._model(model) for model in models]
        said += [self._adapter(one, model) for model in models for one in self._requests.adapters.of(model.name)]
        return json_response({"object": "list", "data": said})

    async def model(self, request: Request) -> ASGIApp:
        """Answers `GET /v1/models/{model:path}`."""
        name = request.path_params["model"]
        model = self._requests.model(name)
        served = None if name == model.name else self._requests.adapters.find(name)
        return json_response(self._model(model) if served is None else self._adapter(served.adapter, model))

    def _adapter(self, adapter: Adapter, model: ModelStatus) -> dict[str, Any]:
        """An adapter as a model, whose parent is its base."""
        of_adapter = {"id": adapter.name, "root": adapter.path, "parent": model.name, "digest": adapter.digest}
        return {**self._model(model), **of_adapter, "pinned": adapter.pinned}

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
            "quantization": model.facts.quantization,
            "weight_bytes": model.facts.weight_bytes,
            "num_replicas": model.num_replicas,
            "chat_template": "given" if model.facts.chat_template else "own" if has_template else None,
        }

    async def health(self, request: Request) -> ASGIApp:
        """200 while any model has a replica; the body lists the problems."""
        if self.is_stopping or not any(model.takes_requests for model in self._dispatch_host.dispatch.models()):
            raise ReplicaError("no replica is up" if not self.is_stopping else "this router is stopping")
        warnings = self._warnings()
        return json_response({"warnings": list(warnings)}) if warnings else Response()

    async def version(self, request: Request) -> ASGIApp:
        """Answers `GET /version`."""
        return json_response({"version": version("holdfast")})

    async def load(self, request: Request) -> ASGIApp:
        """Answers `GET /load`."""
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
        """Answers `GET /cluster`."""
        sessions = self._requests.sessions
        return json_response(cluster_view(self._dispatch_host, self.overload, sessions, is_killable=self._is_killable))

    async def openapi(self, request: Request) -> ASGIApp:
        """Answers `GET /openapi.json`."""
        return json_response(description())

    async def metrics(self, request: Request) -> ASGIApp:
        """Answers `GET /metrics`."""
        samples = router_samples(
            self._requests.stats,
            self._dispatch_host,
            self._responses,
            self._connections,
            self._poison_watch,
            self.overload,
            self.certificates,
        )
        stored = await self.history.figures() if self.history is not None else None
        of_store = () if stored is None or self.history is None else store_samples(stored, self.history.num_failures)
        text, media_type = exposed((*samples, *of_store))
        return Response(text, headers={"content-type": media_type})


T = TypeVar("T")


class TokenEndpoints:
    """Token endpoints of one router. Errors are raised as `HoldfastError`."""

    def __init__(self, request_processor: RequestProcessor, reader: RequestReader) -> None:
        self._requests = request_processor
        self._reader = reader

    async def tokenize(self, request: Request) -> ASGIApp:
        """POST /tokenize: token ids of a prompt or a chat."""
        body, _ = await self._reader.decoded(await self._reader.content(request), TokenizeBody, _same)
        model = self._requests.model(body.model or "")
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt", body.prompt, "or messages must be there, and not both")
        if body.messages is not None:
            chat = chat_of(body, body.messages)
            plan = await self._reader.plan(GenerationRequest(chat=chat, model=model.name, names=body.names))
            assert plan.request.chat is not None, "a chat's request has one"
            token_ids = await self._requests.tokenize_chat(
                model.name, plan.request.chat, add_special_tokens=bool(body.add_special_tokens)
            )
        else:
            assert body.prompt is not None, "one of the two is there"
            with naming(body.names):
                token_ids = await self._requests.tokenize(
                    model.name, body.prompt, add_special_tokens=body.add_special_tokens is not False
                )
        tokens = self._requests.tokenizer(model.name).tokens
        answer = {
            "tokens": token_ids,
            "token_strs": [tokens.piece_of(one) for one in token_ids] if body.return_token_strs else None,
            "count": len(token_ids),
            "max_model_len": model.facts.max_model_len,
        }
        return json_response(answer)

    async def detokenize(self, request: Request) -> ASGIApp:
        """POST /detokenize: text of token ids."""
        body, _ = await self._reader.decoded(await self._reader.content(request), DetokenizeBody, _same)
        with naming(body.names):
            text = await self._requests.detokenize(body.model or "", body.tokens)
        return json_response({"prompt": text})

    async def count_tokens(self, request: Request) -> ASGIApp:
        """POST /v1/messages/count_tokens, Anthropic's API."""
        tenant, content = tenant_of(request), await self._reader.content(request)
        body, bare = await self._reader.decoded(content, CountBody, lambda one: message_request(one, tenant))
        plan = await self._reader.plan(bare, body.shape_field)
        assert plan.request.chat is not None, "a chat's request has one"
        token_ids = await self._requests.tokenize_chat(body.model or "", plan.request.chat)
        return json_response({"input_tokens": len(token_ids)})


def _same(body: T) -> T:
    return body
