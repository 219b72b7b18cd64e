"""HTTP application of a router: the endpoints of OpenAI and Anthropic, and tokenization, as one ASGI application."""

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.router.api.connection_guard import ConnectionGuard
from holdfast.router.api.http.admin import AdminEndpoints
from holdfast.router.api.http.answering import Endpoint, answering, not_found
from holdfast.router.api.http.background import BackgroundResponses
from holdfast.router.api.http.batch_lines import BatchLines
from holdfast.router.api.http.batches import BatchEndpoints
from holdfast.router.api.http.conversations import ConversationEndpoints
from holdfast.router.api.http.event_stream import ANTHROPIC, OPENAI, EventStream
from holdfast.router.api.http.files import FileEndpoints
from holdfast.router.api.http.generation_endpoints import GenerationEndpoints
from holdfast.router.api.http.message_batches import MESSAGES, MessageBatchEndpoints
from holdfast.router.api.http.page_files import PAGE, page_file
from holdfast.router.api.http.pooling import PoolingEndpoints
from holdfast.router.api.http.request_origin import RequestOrigins, guarded, with_cors
from holdfast.router.api.http.request_reader import RequestReader, own_request
from holdfast.router.api.http.response_endpoints import ResponseEndpoints
from holdfast.router.api.http.response_history import ResponseHistory
from holdfast.router.api.http.server import CONNECTION, Connection
from holdfast.router.api.http.state_endpoints import StateEndpoints, TokenEndpoints
from holdfast.router.api.http.stored_chats import StoredChats
from holdfast.router.api.http.submission import Submission
from holdfast.router.api.intake import DecodeWorker, Intake
from holdfast.router.api.load_reports import ASKED_BY, LoadReports
from holdfast.router.api.operators import Operators
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.requests.poison_watch import PoisonWatch, end_reading
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.security.gate import Gate
from holdfast.router.store.batch_store import BatchStore
from holdfast.router.store.database import Database
from holdfast.router.store.file_store import FileStore
from holdfast.router.store.job_store import JobStore
from holdfast.router.store.object_store import ObjectStore, StoreLimits
from holdfast.router.store.response_store import ResponseStore
from holdfast.worker.wire.tls import Certificates


class Api(Starlette):
    """The application, which leases what its requests hold."""

    intake: Intake | None = None
    """Opens the lease of each request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._served(scope, receive, send)
        except BaseException as error:
            end_reading(error)
            raise
        end_reading()

    async def _served(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.intake is None or scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        host, port = scope.get("client") or ("", 0)
        connection: Connection | None = scope.get(CONNECTION)
        with self.intake.of_http(host, port, is_guest=connection is not None and connection.is_guest):
            await super().__call__(scope, receive, send)


class HttpApi:
    """The HTTP API of one router: its endpoints under their paths, guarded and counted."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        dispatch_host: DispatchHost,
        limits: LimitsConfig,
        gate: Gate | None = None,
        operators: Operators | None = None,
        warnings: Callable[[], Sequence[str]] = tuple,
        guard: ConnectionGuard | None = None,
        decode_worker: DecodeWorker | None = None,
        poison_watch: PoisonWatch | None = None,
        intake: Intake | None = None,
        load_reports: LoadReports | None = None,
        certificates: Certificates | None = None,
        max_file_bytes: int = 200 * 2**20,
    ) -> None:
        """The `gate` lets requests in; without it all may come. Without `operators` there are no paths for them.
        `warnings`: warnings that health adds. The `guard` knows the connections of the server. Large bodies are decoded
        by the `decode_worker`, or by a separate one. The `poison_watch` gets each request that is read. Without an
        `intake` bytes of requests are not counted; without `load_reports` no response has one.
        """
        self._load_reports = load_reports
        watch = poison_watch or PoisonWatch()
        reader = RequestReader(request_processor, limits, decode_worker or DecodeWorker(), watch)
        self._gate = gate or Gate()
        self.history = ResponseHistory(self._gate)
        """Stored responses, if there is a store."""
        self._chats = StoredChats(reader, self.history)
        self._conversations = ConversationEndpoints(reader, self.history, limits.max_message_bytes)
        self._generation = GenerationEndpoints(request_processor, reader, self._load_header, self._chats)
        self.responses = ResponseEndpoints(
            request_processor, reader, self._generation, self.history, watch, limits.max_message_bytes
        )
        self._files = FileEndpoints(self.history, max_file_bytes)
        self.batches = BatchEndpoints(request_processor, reader, self.history, limits.max_message_bytes)
        self._message_batches = MessageBatchEndpoints(request_processor, reader, self.history, self.batches)
        self._tokens = TokenEndpoints(request_processor, reader)
        self._of_lines: dict[str, Endpoint] = {
            "/v1/chat/completions": self._generation.chat_completions,
            "/v1/completions": self._generation.completions,
            "/v1/responses": self.responses.create,
            MESSAGES: self._generation.messages,
        }
        self._pooling = PoolingEndpoints(request_processor, reader)
        self._of_lines["/v1/embeddings"] = self._pooling.embeddings
        self._guard = guard
        self._intake = intake
        self._admin = [] if operators is None else AdminEndpoints(operators, reader.content, reader.bounds).routes()
        self._responses: Counter[tuple[str, int]] = Counter()
        is_killable = operators is not None and operators.may_kill
        self._state = StateEndpoints(
            request_processor, dispatch_host, self._responses, warnings, is_killable, guard, watch
        )
        self._state.overload = None if intake is None else intake.overload
        self._state.certificates = certificates
        self._state.history = self.history

    def stop(self) -> None:
        """Makes `/health` and `/ready` answer that the router does not serve."""
        self._state.is_stopping = True

    async def open_store(self, config: RouterConfig) -> None:
        """Opens the configured store, and begins to compute its waiting jobs. Raises `StoreError`."""
        assert config.store is not None, "there is one"
        limits = StoreLimits(max_bytes=config.store_max_bytes, retention_s=config.store_retention_s)
        objects = ObjectStore(await Database.open(config.store), limits)
        await objects.purge()
        self.history.store = store = ResponseStore(objects)
        jobs, enter = JobStore(store, uuid.uuid4().hex), self._gate.enter_trusted
        self.history.background = BackgroundResponses(jobs, self.responses.job, enter)
        self.batches.store = batches = BatchStore(FileStore(objects), jobs)
        enter_line = partial(enter, has_paid=False)
        self.batches.lines = BatchLines(jobs, batches, self.call, enter_line, config.batch_concurrency)

    async def leave_jobs(self) -> None:
        """Leaves background work to other routers."""
        if self.history.background is not None:
            await self.history.background.stop()
        if self.batches.lines is not None:
            await self.batches.lines.stop()

    @property
    def is_stopping(self) -> bool:
        return self._state.is_stopping

    def app(self, origins: RequestOrigins | None = None) -> Starlette:
        """The application, which is also what others mount. `origins`: which hosts and pages may call it without keys;
        by default those of a server on loopback.
        """
        origins, generation, tokens = origins or RequestOrigins(), self._generation, self._tokens
        routes = [
            ("POST", "/v1/chat/completions", generation.chat_completions),
            ("POST", "/v1/completions", generation.completions),
            ("POST", "/tokenize", tokens.tokenize),
            ("POST", "/detokenize", tokens.detokenize),
            *self._pooling.routes(),
            *self._state.routes(),
            *self.responses.routes(),
            *self._chats.routes(),
            *self._conversations.routes(),
            *self._files.routes(),
            *self.batches.routes(),
            *(("GET", path, page_file(path)) for path in PAGE),
            *self._admin,
        ]
        of_anthropic = [
            ("POST", "/v1/messages", generation.messages),
            ("POST", "/v1/messages/count_tokens", tokens.count_tokens),
            *self._message_batches.routes(),
        ]
        api = Api(
            routes=[
                Route(
                    path,
                    self._counting(path, answering(guarded(endpoint, path, self._gate, origins, self._guard), shape)),
                    methods=[method],
                )
                for shape, some in ((OPENAI, routes), (ANTHROPIC, of_anthropic))
                for method, path, endpoint in some
            ],
            exception_handlers={HTTPException: not_found},
        )
        api.intake = self._intake
        return api

    async def call(self, path: str, tenant: str, content: bytes, submission: Submission) -> Response:
        """The whole answer of a generating endpoint to a request of this process, whose caller the running task is."""
        endpoint = answering(self._of_lines[path], ANTHROPIC if path == MESSAGES else OPENAI)
        try:
            answer = await endpoint(own_request(path, tenant, content, submission))
        except BaseException as error:
            end_reading(error)
            raise
        end_reading()
        assert isinstance(answer, Response), "it asks for no stream"
        return answer

    def app_for_pages(self, origins: RequestOrigins) -> ASGIApp:
        """The application, also for pages of the origins that are given (`request_origin.py`)."""
        return with_cors(self.app(origins), origins.cors_origins, self._guard)

    # --- inside ---

    def _counting(self, path: str, call: Endpoint) -> Endpoint:
        """An endpoint whose responses are counted by their status."""

        async def counted(request: Request) -> ASGIApp:
            response = await call(request)
            if isinstance(response, Response):
                response.headers.update(self._load_header(request))
            if isinstance(response, EventStream):
                response.on_status = partial(self._count, path)
            elif isinstance(response, Response):
                self._count(path, response.status_code)
            return response

        return counted

    def _load_header(self, request: Request) -> dict[str, str]:
        asked = request.headers.get(ASKED_BY)
        return {} if asked is None or self._load_reports is None else self._load_reports.header(asked)

    def _count(self, path: str, status: int) -> None:
        self._responses[path, status] += 1
