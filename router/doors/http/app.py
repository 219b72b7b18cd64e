"""HTTP application of a router: the endpoints of OpenAI and Anthropic, and tokenization, as one ASGI application.

What may live here: routes, headers, and the way from a request's bytes to an endpoint and back. What may not: what an
endpoint says (`chat_completions.py`, `completions.py`), what the router tells of itself (`state_endpoints.py`), and the
server that runs it (`server.py`).
"""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.router.config import LimitsConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.doors.chat_answer import ChatPlan
from holdfast.router.doors.connection_guard import ConnectionGuard
from holdfast.router.doors.decode_worker import DecodeWorker
from holdfast.router.doors.http.admin import AdminEndpoints
from holdfast.router.doors.http.answering import Endpoint, answering, headers_of, json_response, not_found, unless_gone
from holdfast.router.doors.http.authentication import guarded
from holdfast.router.doors.http.bodies import ChatBody, CompletionBody, DetokenizeBody, Reads, TokenizeBody
from holdfast.router.doors.http.body_bounds import body_bounds
from holdfast.router.doors.http.chat_completions import ChatChunks, ChatView, chat_of, chat_request, whole_chat
from holdfast.router.doors.http.completions import Completions, completion_requests
from holdfast.router.doors.http.connection import CONNECTION, Connection
from holdfast.router.doors.http.cross_origin import with_cors
from holdfast.router.doors.http.event_stream import ANTHROPIC, OPENAI, PLAIN_SEND, EventStream, Shape, Shortcut
from holdfast.router.doors.http.messages import MessageEvents, whole_message
from holdfast.router.doors.http.messages_body import CountBody, MessagesBody
from holdfast.router.doors.http.messages_body import chat_body as messages_chat
from holdfast.router.doors.http.page_files import PAGE, page_file
from holdfast.router.doors.http.request_origin import RequestOrigins, check_json
from holdfast.router.doors.http.responses import ResponseEvents, whole_response
from holdfast.router.doors.http.responses_body import ResponsesBody
from holdfast.router.doors.http.responses_body import chat_body as responses_chat
from holdfast.router.doors.http.state_endpoints import StateEndpoints
from holdfast.router.doors.http.submission import (
    Encoder,
    Submission,
    answer_events,
    catch_up,
    note_reading,
    numbered_events,
    straight,
)
from holdfast.router.doors.intake import Intake, arriving
from holdfast.router.doors.load_reports import ASKED_BY, LoadReports
from holdfast.router.doors.operators import Operators
from holdfast.router.held_stream import RESUME
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.beam_answer import BeamAnswer
from holdfast.router.requests.poison_watch import PoisonWatch, current_reading, end_reading
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.requests.tracing import TRACEPARENT, note_incoming
from holdfast.router.security.gate import Gate
from holdfast.router.text.token_table import TokenTable
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import Priority
from holdfast.worker.security.certificates import Certificates

TENANT: Final = "x-tenant"
NO_CONTENT: Final = 204
"""By the standard of server-sent events, what tells a client not to come again."""

B = TypeVar("B", bound=Reads)
T = TypeVar("T")


class Door(Starlette):
    """The application. Streams write past its middlewares, which would take part in every event: theirs is to answer
    exceptions, and streams answer their own.
    """

    intake: Intake | None = None
    """Opens the lease of each request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[PLAIN_SEND] = send
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


class HttpDoor:
    """The endpoints of one router. Errors are raised as `HoldfastError`."""

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
    ) -> None:
        """The `gate` lets requests in; without it all may come. Without `operators` there are no paths for them.
        `warnings`: what health says besides. The `guard` knows the connections of the server. Large bodies are decoded
        by the `decode_worker`, or one of its own. The `poison_watch` is told what is read. Without an `intake` nothing
        counts what requests hold; without `load_reports` no response tells of them.
        """
        self._load_reports = load_reports
        self._decode_worker = decode_worker or DecodeWorker()
        self._bounds = body_bounds(limits)
        self._poison_watch = poison_watch or PoisonWatch()
        self._requests = request_processor
        self._gate = gate or Gate()
        self._limits = limits
        self._guard = guard
        self._intake = intake
        self._admin = [] if operators is None else AdminEndpoints(operators, self._content, self._bounds).routes()
        self._responses: Counter[tuple[str, int]] = Counter()
        is_killable = operators is not None and operators.may_kill
        self._state = StateEndpoints(
            request_processor, dispatch_host, self._responses, warnings, is_killable, guard, self._poison_watch
        )
        self._state.overload = None if intake is None else intake.overload
        self._state.certificates = certificates

    def stop(self) -> None:
        """From here on `/health` and `/ready` say no."""
        self._state.is_stopping = True

    @property
    def is_stopping(self) -> bool:
        return self._state.is_stopping

    def app(self, origins: RequestOrigins | None = None) -> Starlette:
        """The application, which is also what others mount. `origins`: which hosts and pages may call it without keys;
        by default those of a server on loopback.
        """
        origins = origins or RequestOrigins()
        routes = [
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/responses", self.responses),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            *self._state.routes(),
            *(("GET", path, page_file(path)) for path in PAGE),
            *self._admin,
        ]
        of_anthropic = [
            ("POST", "/v1/messages", self.messages),
            ("POST", "/v1/messages/count_tokens", self.count_tokens),
        ]
        door = Door(
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
        door.intake = self._intake
        return door

    def app_for_pages(self, origins: RequestOrigins) -> ASGIApp:
        """The application, also for pages of the origins that are given (`cross_origin.py`)."""
        return with_cors(self.app(origins), origins.cors_origins, self._guard)

    # --- generation ---

    async def chat_completions(self, request: Request) -> ASGIApp:
        submission, content = await self._submission(request)
        body, bare = await self._decoded(content, ChatBody, partial(chat_request, tenant=_tenant(request)))
        plan = await self._plan(bare)
        generation = submission.of(plan.request, choices=plan.request.sampling_params.n)
        view = ChatView(
            body=body,
            created=submission.identity.created,
            tokens=self._tokens(generation),
            new_reader=plan.new_reader,
            prompt_text=await self._prompt_text(generation) if body.return_prompt_text else None,
        )
        if not body.streams:
            answer: SampledAnswer | BeamAnswer
            async with AsyncExitStack() as stack:
                (answer,) = await self._open(stack, [generation])
                completed = await unless_gone(request, answer.whole())
            return json_response(whole_chat(view, completed, answer.prompt_token_ids))
        generation.check_streamable()
        return await self._streamed(request, submission, generation, lambda answer: ChatChunks(view, answer))

    def _tokens(self, generation: GenerationRequest) -> TokenTable:
        return self._requests.tokenizer(self._requests.model(generation.model).name).tokens

    async def _prompt_text(self, generation: GenerationRequest) -> str:
        assert generation.chat is not None, "a chat's request has one"
        return await self._requests.render(generation.model, generation.chat)

    async def completions(self, request: Request) -> ASGIApp:
        submission, content = await self._submission(request)
        body, bare = await self._decoded(content, CompletionBody, partial(completion_requests, tenant=_tenant(request)))
        choices = bare[0].sampling_params.n
        generations = [
            submission.of(one, number=number, num_prompts=len(bare), choices=choices) for number, one in enumerate(bare)
        ]
        if (reading := current_reading()) is not None:
            reading.expect(len(generations))
        if not body.streams:
            async with AsyncExitStack() as stack:
                answers = await self._open(stack, generations)
                tokenizer = self._requests.tokenizer(answers[0].model)
                response = Completions(body, answers, submission.identity.created, tokenizer)
                return json_response(await unless_gone(request, response.whole()))
        generations[0].check_streamable()
        if submission.comes_again:
            submission, generations = await unless_gone(request, self._redone(submission, generations))
        if submission.is_over:
            return Response(status_code=NO_CONTENT)
        shortcut = Shortcut()
        events = self._completion_stream(body, generations, submission, shortcut)
        headers = headers_of(request) | submission.headers | self._load_header(request)
        return EventStream(events, headers, is_held=submission.is_held, shortcut=shortcut)

    async def _completion_stream(
        self,
        body: CompletionBody,
        generations: Sequence[GenerationRequest],
        submission: Submission,
        shortcut: Shortcut,
    ) -> AsyncGenerator[bytes, None]:
        async with AsyncExitStack() as stack:
            answers = await self._open(stack, generations)
            tokenizer = self._requests.tokenizer(answers[0].model)
            encoder = Completions(body, answers, submission.identity.created, tokenizer)
            catch_up(encoder, encoder.received(), submission)
            if len(answers) == 1 and isinstance(answers[0], SampledAnswer):
                answers[0].hand_to(straight(answers[0], encoder, shortcut, submission))
            async for event in numbered_events(encoder.numbered(), len(answers), encoder, submission):
                yield event

    async def responses(self, request: Request) -> ASGIApp:
        submission, content = await self._submission(request)
        tenant = _tenant(request)
        body, bare = await self._decoded(content, ResponsesBody, lambda one: chat_request(responses_chat(one), tenant))
        plan = await self._plan(bare, "text.format")
        generation, created = submission.of(plan.request), submission.identity.created
        tokens = self._tokens(generation)
        if not body.stream:
            async with self._requests.open(generation) as answer:
                completed = await unless_gone(request, answer.whole())
            return json_response(whole_response(body, completed, created, plan.new_reader(), tokens))
        return await self._streamed(
            request,
            submission,
            generation,
            lambda answer: ResponseEvents(body, answer, created, plan.new_reader(), tokens),
        )

    async def messages(self, request: Request) -> ASGIApp:
        submission, content = await self._submission(request)
        tenant = _tenant(request)
        body, bare = await self._decoded(content, MessagesBody, lambda one: chat_request(messages_chat(one), tenant))
        plan = await self._plan(bare, body.shape_field)
        generation = submission.of(plan.request)
        if not body.stream:
            async with self._requests.open(generation) as answer:
                return json_response(whole_message(await unless_gone(request, answer.whole()), plan.new_reader()))
        return await self._streamed(
            request, submission, generation, lambda answer: MessageEvents(answer, plan.new_reader()), ANTHROPIC
        )

    async def count_tokens(self, request: Request) -> ASGIApp:
        tenant, content = _tenant(request), await self._content(request)
        body, bare = await self._decoded(content, CountBody, lambda one: chat_request(messages_chat(one), tenant))
        plan = await self._plan(bare, body.shape_field)
        assert plan.request.chat is not None, "a chat's request has one"
        token_ids = await self._requests.tokenize_chat(body.model or "", plan.request.chat)
        return json_response({"input_tokens": len(token_ids)})

    async def _plan(self, generation: GenerationRequest, shape_field: str = "response_format") -> ChatPlan:
        return await ChatPlan.of(generation, self._requests, shape_field=shape_field)

    async def _submission(self, request: Request) -> tuple[Submission, bytes]:
        """Which request it is, and its body's own bytes."""
        note_incoming(request.headers.get(TRACEPARENT, ""))
        # Before the body is read: what is shed whatever it says costs nothing more.
        self._requests.check_overload(Priority.CRITICAL, is_resumed=RESUME in request.headers)
        content = await self._content(request)
        num_bytes = len(content) if RESUME in request.headers else 0  # what the client notes is to be read too
        read = partial(Submission.read, request.headers, content, self._limits)
        return await self._decode_worker.run(num_bytes, read)

    async def _redone(
        self, submission: Submission, generations: Sequence[GenerationRequest]
    ) -> tuple[Submission, list[GenerationRequest]]:
        """A submission whose client says where it is, with the tokens until there, which are computed once more."""
        choices = generations[0].sampling_params.n
        tokens: dict[int, tuple[int, ...]] = {}
        for number, bare in enumerate(generations):
            if (again := submission.until_there(bare, number * choices)) is not None:
                async with self._requests.open(again) as answer:
                    completed = (await answer.whole()).completions
                outputs = [one.output for one in completed]
                tokens |= {number * choices + one.sequence_index: one.token_ids for one in outputs}
        known = submission.with_tokens(tokens)
        requests = [
            known.of(one, number=number, num_prompts=len(generations), choices=choices)
            for number, one in enumerate(generations)
        ]
        return known, requests

    async def _streamed(
        self,
        request: Request,
        submission: Submission,
        generation: GenerationRequest,
        encoder_of: Callable[[SampledAnswer], Encoder],
        shape: Shape = OPENAI,
    ) -> ASGIApp:
        if submission.comes_again:
            submission, (generation,) = await unless_gone(request, self._redone(submission, [generation]))
        if submission.is_over:
            return Response(status_code=NO_CONTENT)
        shortcut = Shortcut()
        events = answer_events(self._requests.open(generation), encoder_of, submission, shortcut)
        headers = headers_of(request) | submission.headers | self._load_header(request)
        return EventStream(events, headers, shape, is_held=submission.is_held, shortcut=shortcut)

    async def _open(
        self, stack: AsyncExitStack, generations: Sequence[GenerationRequest]
    ) -> list[SampledAnswer | BeamAnswer]:
        """Opens all requests, which the stack closes."""
        answers: list[SampledAnswer | BeamAnswer] = []
        for one in generations:
            opening = self._requests.open if one.sampling_params.beam_width is None else self._requests.search
            answers.append(await stack.enter_async_context(opening(one)))
        return answers

    # --- tokens ---

    async def tokenize(self, request: Request) -> ASGIApp:
        body, _ = await self._decoded(await self._content(request), TokenizeBody, _same)
        model = self._requests.model(body.model or "")
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt", body.prompt, "or messages must be there, and not both")
        if body.messages is not None:
            plan = await self._plan(GenerationRequest(chat=chat_of(body, body.messages), model=model.name))
            assert plan.request.chat is not None, "a chat's request has one"
            token_ids = await self._requests.tokenize_chat(model.name, plan.request.chat)
        else:
            assert body.prompt is not None, "one of the two is there"
            token_ids = await self._requests.tokenize(
                model.name, body.prompt, add_special_tokens=body.add_special_tokens
            )
        answer = {"tokens": token_ids, "count": len(token_ids), "max_model_len": model.facts.max_model_len}
        if body.return_token_strs:
            answer["token_strs"] = [self._requests.tokenizer(model.name).tokens.piece_of(one) for one in token_ids]
        return json_response(answer)

    async def detokenize(self, request: Request) -> ASGIApp:
        body, _ = await self._decoded(await self._content(request), DetokenizeBody, _same)
        return json_response({"prompt": await self._requests.detokenize(body.model or "", body.tokens)})

    # --- inside ---

    def _counting(self, path: str, call: Endpoint) -> Endpoint:
        """An endpoint whose responses are counted by their status."""

        async def counted(request: Request) -> ASGIApp:
            response = await call(request)
            if isinstance(response, Response):
                response.headers.update(self._load_header(request))
            if isinstance(response, EventStream):
                response.on_status = lambda status: self._count(path, status)
            elif isinstance(response, Response):
                self._count(path, response.status_code)
            return response

        return counted

    def _load_header(self, request: Request) -> dict[str, str]:
        asked = request.headers.get(ASKED_BY)
        return {} if asked is None or self._load_reports is None else self._load_reports.header(asked)

    def _count(self, path: str, status: int) -> None:
        self._responses[path, status] += 1

    async def _decoded(self, content: bytes, kind: type[B], made_of: Callable[[B], T]) -> tuple[B, T]:
        """A body, and what is made of it, off the event loop where it is large. Raises `InvalidRequestError`."""

        def decode() -> tuple[B, T]:
            body = kind.read(content, self._bounds)
            return body, made_of(body)

        return await self._decode_worker.run(len(content), decode)

    async def _content(self, request: Request) -> bytes:
        """The bytes of a request's body, which must be called JSON, as many as are allowed."""
        check_json(request)
        parts, size, most = [], 0, self._limits.max_message_bytes
        with arriving() as take:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    limit = f"must have at most {most} bytes (limits.max_message_bytes)"
                    raise InvalidRequestError("body", size, limit)
                take(len(part))
                parts.append(part)
        content = b"".join(parts)
        note_reading(self._poison_watch, request.url.path, request.headers, content)
        return content


def _same(body: B) -> B:
    return body


def _tenant(request: Request) -> str:
    return request.headers.get(TENANT, "")
