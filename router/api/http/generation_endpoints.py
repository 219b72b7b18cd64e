"""Endpoints that generate: chats, completions, responses and messages, each in one piece or as a stream of events."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import headers_of, json_response, unless_gone
from holdfast.router.api.http.bodies import ChatBody, CompletionBody
from holdfast.router.api.http.chat_completions import ChatChunks, ChatView, chat_request, whole_chat
from holdfast.router.api.http.completions import Completions, completion_requests
from holdfast.router.api.http.event_stream import ANTHROPIC, OPENAI, EventStream, Shape
from holdfast.router.api.http.messages import MessageEvents, message_request, whole_message
from holdfast.router.api.http.messages_body import MessagesBody
from holdfast.router.api.http.request_reader import RequestReader, tenant_of
from holdfast.router.api.http.server import CONNECTION, Connection
from holdfast.router.api.http.stored_chats import StoredChats, StoredChunks
from holdfast.router.api.http.submission import (
    Encoder,
    Submission,
    answer_events,
    catch_up,
    encoded,
)
from holdfast.router.request import GenerationRequest, naming
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.beam_search import BeamAnswer
from holdfast.router.requests.poison_watch import expect_prompts
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.text.token_table import TokenTable

NO_CONTENT: Final = 204
"""Status that tells a client of server-sent events not to reconnect."""


class GenerationEndpoints:
    """Generation endpoints of one router. Errors are raised as `HoldfastError`."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        reader: RequestReader,
        load_header: Callable[[Request], dict[str, str]],
        chats: StoredChats,
    ) -> None:
        """`load_header` makes the ORCA load header of a stream, for requests that ask for it."""
        self._requests = request_processor
        self._reader = reader
        self._load_header = load_header
        self._chats = chats

    async def chat_completions(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions, streamed or whole."""
        submission, content = await self._reader.submission(request)
        body, bare = await self._reader.decoded(content, ChatBody, partial(chat_request, tenant=tenant_of(request)))
        save = self._chats.save(request, body)
        submission = self._reader.named(submission, bare)
        plan = await self._reader.plan(bare, body.shape_field)
        generation = submission.of(plan.request, choices=plan.request.sampling_params.n)
        view = ChatView(
            body=body,
            created=submission.identity.created,
            tokens=self.tokens(generation),
            new_reader=plan.new_reader,
            prompt_text=await self.prompt_text(generation) if body.return_prompt_text else None,
        )
        if not body.streams:
            answer: SampledAnswer | BeamAnswer
            async with AsyncExitStack() as stack:
                (answer,) = await self._open(stack, [generation])
                completed = await unless_gone(request, answer.whole())
            response = whole_chat(view, completed, answer.request.prompt_token_ids)
            if save is not None:
                await save(response)
            return json_response(response)
        generation.check_streamable()
        if save is not None:
            return await self.streamed(request, submission, generation, partial(StoredChunks, view, save=save))
        return await self.streamed(request, submission, generation, partial(ChatChunks, view))

    def tokens(self, generation: GenerationRequest) -> TokenTable:
        return self._requests.tokenizer(self._requests.model(generation.model).name).tokens

    async def prompt_text(self, generation: GenerationRequest) -> str:
        """Chat's messages as the model's template writes them."""
        assert generation.chat is not None, "a chat's request has one"
        return await self._requests.render(generation.model, generation.chat)

    async def _as_written(self, generation: GenerationRequest) -> GenerationRequest:
        """A prompt as the tokens of its text alone."""
        if not isinstance(generation.prompt, str):
            return generation
        with naming(generation.names):
            token_ids = await self._requests.tokenize(generation.model, generation.prompt, add_special_tokens=False)
        return replace(generation, prompt=token_ids)

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions: one prompt or several, streamed or whole."""
        submission, content = await self._reader.submission(request)
        body, bare = await self._reader.decoded(
            content, CompletionBody, partial(completion_requests, tenant=tenant_of(request))
        )
        submission = self._reader.named(submission, bare[0])
        if body.add_special_tokens is False:
            bare = [await self._as_written(one) for one in bare]
        choices = bare[0].sampling_params.n
        generations = [
            submission.of(one, number=number, num_prompts=len(bare), choices=choices) for number, one in enumerate(bare)
        ]
        if len(generations) > 1:
            expect_prompts(len(generations))
        if not body.streams:
            async with AsyncExitStack() as stack:
                answers = await self._open(stack, generations)
                tokenizer = self._requests.tokenizer(answers[0].model)
                response = Completions(body, answers, submission.identity.created, tokenizer)
                return json_response(await unless_gone(request, response.whole()))
        generations[0].check_streamable()
        if submission.is_recomputed:
            submission, generations = await unless_gone(request, self._redone(submission, generations))
        if submission.is_over:
            return Response(status_code=NO_CONTENT)
        events = self._completion_stream(body, generations, submission, request.scope.get(CONNECTION))
        headers = headers_of(request) | submission.headers | self._load_header(request)
        return EventStream(events, headers, is_held=submission.is_held)

    async def _completion_stream(
        self,
        body: CompletionBody,
        generations: Sequence[GenerationRequest],
        submission: Submission,
        connection: Connection | None,
    ) -> AsyncGenerator[bytes, None]:
        async with AsyncExitStack() as stack:
            answers = await self._open(stack, generations)
            tokenizer = self._requests.tokenizer(answers[0].model)
            encoder = Completions(body, answers, submission.identity.created, tokenizer)
            catch_up(encoder, encoder.received(), submission)
            sinks = [answer for answer in answers if isinstance(answer, SampledAnswer)]
            async for event in encoded(encoder.numbered(), encoder, submission, sinks, connection):
                yield event

    async def messages(self, request: Request) -> ASGIApp:
        """POST /v1/messages, Anthropic's API."""
        submission, content = await self._reader.submission(request)
        tenant = tenant_of(request)
        body, bare = await self._reader.decoded(content, MessagesBody, lambda one: message_request(one, tenant))
        submission = self._reader.named(submission, bare)
        plan = await self._reader.plan(bare, body.shape_field)
        generation = submission.of(plan.request)
        if not body.stream:
            async with self._requests.open(generation) as answer:
                completed = await unless_gone(request, answer.whole())
                return json_response(whole_message(completed, plan.new_reader(), answer.request.kept_prefixes))
        return await self.streamed(
            request, submission, generation, lambda answer: MessageEvents(answer, plan.new_reader()), ANTHROPIC
        )

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
                tokens |= {number * choices + one.sequence_index: one.token_ids for one in completed}
        known = submission.with_tokens(tokens)
        requests = [
            known.of(one, number=number, num_prompts=len(generations), choices=choices)
            for number, one in enumerate(generations)
        ]
        return known, requests

    async def streamed(
        self,
        request: Request,
        submission: Submission,
        generation: GenerationRequest,
        encoder_of: Callable[[SampledAnswer], Encoder],
        shape: Shape = OPENAI,
    ) -> ASGIApp:
        """Server-sent events of one generation; 204 if the client has had the whole stream already."""
        if submission.is_recomputed:
            submission, (generation,) = await unless_gone(request, self._redone(submission, [generation]))
        if submission.is_over:
            return Response(status_code=NO_CONTENT)
        events = answer_events(self._requests.open(generation), encoder_of, submission, request.scope.get(CONNECTION))
        headers = headers_of(request) | submission.headers | self._load_header(request)
        return EventStream(events, headers, shape, is_held=submission.is_held)

    async def _open(
        self, stack: AsyncExitStack, generations: Sequence[GenerationRequest]
    ) -> list[SampledAnswer | BeamAnswer]:
        """Opens all requests, which the stack closes."""
        answers: list[SampledAnswer | BeamAnswer] = []
        for one in generations:
            opening = self._requests.open if one.sampling_params.beam_width is None else self._requests.search
            answers.append(await stack.enter_async_context(opening(one)))
        return answers
