"""Endpoints of `/v1/responses`: a response made whole, as a stream or in the background, and stored ones."""

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from holdfast.router.api.chat_answer import ChatPlan
from holdfast.router.api.http.answering import Endpoint, headers_of, json_response, unless_gone
from holdfast.router.api.http.background import Save
from holdfast.router.api.http.chat_completions import chat_request
from holdfast.router.api.http.event_stream import EventStream
from holdfast.router.api.http.generation_endpoints import GenerationEndpoints
from holdfast.router.api.http.request_origin import check_json
from holdfast.router.api.http.request_reader import RequestReader, tenant_of
from holdfast.router.api.http.response_history import ResponseHistory, Turn
from holdfast.router.api.http.responses import RawMessages, ResponseEvents, queued_response, whole_response
from holdfast.router.api.http.responses_body import ResponsesBody, chat_body
from holdfast.router.api.http.stored_objects import SETTING, id_of, page_asked, page_of
from holdfast.router.api.http.submission import Submission, answer_events
from holdfast.router.generation import Generation
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.poison_watch import PoisonWatch, begin_reading, end_reading
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.store.job_store import Job
from holdfast.router.store.response_store import RESPONSE
from holdfast.router.text.token_table import TokenTable
from holdfast.worker.errors import InvalidRequestError, NotFoundError

PATH: Final = "/v1/responses"
INPUT_TOKENS: Final = f"{PATH}/input_tokens"
_ONE: Final = f"{PATH}/{{response_id}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A request of `POST /v1/responses`, read and checked."""

    body: ResponsesBody
    turn: Turn
    earlier: list[dict[str, Any]] | None
    """Items before its input; None: it continues nothing."""
    submission: Submission
    generation: GenerationRequest
    plan: ChatPlan
    tokens: TokenTable
    prompt_text: str | None

    def events(self, save: Save | None, answer: SampledAnswer) -> ResponseEvents:
        created, reader = self.submission.identity.created, self.plan.new_reader()
        stored = self.turn.is_kept
        return ResponseEvents(self.body, answer, created, reader, self.tokens, self.prompt_text, save, is_stored=stored)

    def whole(self, completed: Generation, answer: SampledAnswer) -> dict[str, Any]:
        text, created, reader = self.prompt_text, self.submission.identity.created, self.plan.new_reader()
        raw = None if text is None else RawMessages(text, answer.request.prompt_token_ids)
        stored = self.turn.is_kept
        return whole_response(self.body, completed, created, reader, self.tokens, raw, is_stored=stored)

    def queued(self, model: str) -> dict[str, Any]:
        identity = self.submission.identity
        return queued_response(self.body, identity.request_id, model, identity.created, self.tokens)


class ResponseEndpoints:
    """Response endpoints of one router. Errors are raised as `HoldfastError`."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        reader: RequestReader,
        generation: GenerationEndpoints,
        history: ResponseHistory,
        poison_watch: PoisonWatch,
        max_history_bytes: int,
    ) -> None:
        """A conversation has at most `max_history_bytes`."""
        self._requests = request_processor
        self._reader = reader
        self._generation = generation
        self._history = history
        self._poison_watch = poison_watch
        self._max_history_bytes = max_history_bytes

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            ("POST", PATH, self.create),
            ("POST", INPUT_TOKENS, self.input_tokens),
            ("GET", _ONE, self.get),
            ("DELETE", _ONE, self.delete),
            ("POST", f"{_ONE}/cancel", self.cancel),
            ("GET", f"{_ONE}/input_items", self.input_items),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """Answers `POST /v1/responses`."""
        submission, content = await self._reader.submission(request)
        owner = self._history.tenant(request)
        made = await self._prepared(content, tenant_of(request), owner, submission)
        if made.body.background:
            return await self._in_background(request, content, owner, made)
        turn = made.turn
        if not made.body.stream:
            async with self._requests.open(made.generation) as answer:
                completed = await unless_gone(request, answer.whole())
            response = made.whole(completed, answer)
            await turn.save(response)
            return json_response(response)
        encoder_of = partial(made.events, turn.save if turn.is_saved else None)
        return await self._generation.streamed(request, made.submission, made.generation, encoder_of)

    async def input_tokens(self, request: Request) -> ASGIApp:
        """Answers `POST /v1/responses/input_tokens`: the number of prompt tokens of such a request."""
        submission, content = await self._reader.submission(request)
        made = await self._prepared(content, tenant_of(request), self._history.tenant(request), submission)
        assert made.plan.request.chat is not None, "a response's request has one"
        token_ids = await self._requests.tokenize_chat(made.generation.model, made.plan.request.chat)
        return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def _prepared(
        self,
        content: bytes,
        tenant: str,
        owner: str,
        submission: Submission,
        earlier: list[dict[str, Any]] | None = None,
    ) -> _Prepared:
        """`owner`: whose stored responses it may continue. `earlier`: the response that it continues, if it was read
        before.
        """

        def chat_of(one: ResponsesBody, earlier: Sequence[dict[str, Any]] = ()) -> GenerationRequest:
            return chat_request(chat_body(one, earlier), tenant)

        body, first = await self._reader.decoded(
            content, ResponsesBody, lambda one: None if one.continues else chat_of(one)
        )
        turn = Turn(self._history, owner, body)
        if (bare := first) is None:
            if earlier is None:
                earlier = await turn.earlier(self._max_history_bytes, submission)
            bare = await self._reader.made(self._max_history_bytes, partial(chat_of, body, earlier))
        submission = self._reader.named(submission, bare)
        plan = await self._reader.plan(bare, body.shape_field_or("text.format"))
        generation = submission.of(plan.request)
        return _Prepared(
            body=body,
            turn=turn,
            earlier=earlier,
            submission=submission,
            generation=generation,
            plan=plan,
            tokens=self._generation.tokens(generation),
            prompt_text=await self._generation.prompt_text(generation) if body.enable_response_messages else None,
        )

    async def _in_background(self, request: Request, content: bytes, owner: str, made: _Prepared) -> ASGIApp:
        background = self._history.background
        if background is None:
            raise InvalidRequestError("background", True, SETTING)
        self._requests.charge(made.generation)
        response = made.queued(self._requests.model(made.generation.model).name)
        response_id, identity = response["id"], made.submission.identity.text
        # With the response that it continues, which may be changed or deleted before the end.
        said = json.dumps(made.earlier).encode() + b"\n" + content
        job = Job(
            tenant=owner,
            id=response_id,
            object_id=response_id,
            content=said,
            identity=identity,
            key_name=self._requests.key_name,
        )
        await background.submit(job, made.turn.stored(response))
        if made.body.stream:
            return EventStream(background.stream(owner, job.id), headers_of(request))
        return json_response(response)

    async def job(
        self, content: bytes, tenant: str, submission: Submission, save: Save
    ) -> tuple[dict[str, Any], AsyncGenerator[bytes, None]]:
        """Same as `background.Prepare`."""
        earlier, _, content = content.partition(b"\n")
        begin_reading(self._poison_watch, PATH, content)
        try:
            made = await self._prepared(content, tenant, tenant, submission, json.loads(earlier))
            model = self._requests.model(made.generation.model).name
        except BaseException as error:
            end_reading(error)
            raise
        opening = self._requests.open(made.generation)
        return made.queued(model), answer_events(opening, partial(made.events, save), made.submission, None)

    async def get(self, request: Request) -> ASGIApp:
        """Answers `GET /v1/responses/{response_id}`."""
        asked, tenant = request.query_params, self._history.tenant(request)
        response_id = id_of(request, "response_id", RESPONSE)
        stored = await self._history.required(response_id).get(tenant, response_id)
        if not _flag("stream", asked.get("stream", "false")):
            return json_response(stored.response)
        background = self._history.background
        if background is None or not stored.response["background"]:
            raise InvalidRequestError("stream", True, "must be false: only events of background responses are stored")
        after = _number("starting_after", asked.get("starting_after", "-1"))
        return EventStream(background.stream(tenant, response_id, after), headers_of(request))

    async def cancel(self, request: Request) -> ASGIApp:
        """Answers `POST /v1/responses/{response_id}/cancel`."""
        response_id, background = id_of(request, "response_id", RESPONSE), self._history.background
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            check_json(request)
        if background is None:
            raise NotFoundError("response", response_id)
        return json_response(await background.cancel(self._history.tenant(request), response_id))

    async def delete(self, request: Request) -> ASGIApp:
        """Answers `DELETE /v1/responses/{response_id}`."""
        response_id = id_of(request, "response_id", RESPONSE)
        await self._history.required(response_id).delete(self._history.tenant(request), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> ASGIApp:
        """The input of a response alone, without the turns before it; newest first, unless `order` is `asc`."""
        response_id, tenant = id_of(request, "response_id", RESPONSE), self._history.tenant(request)
        stored = await self._history.required(response_id).get(tenant, response_id)
        return json_response(page_of(stored.input, page_asked(request.query_params)))


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequestError(name, value, "must be true or false")
    return value.lower() in ("true", "1")


def _number(name: str, value: str) -> int:
    if not value.removeprefix("-").isdecimal() or not value.isascii() or len(value) > 18 or int(value) < -1:
        raise InvalidRequestError(name, value, "must be the number of an event")
    return int(value)
