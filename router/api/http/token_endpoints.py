"""Endpoints that tokenize: texts, chats and messages to tokens, tokens to text, and counts."""

from typing import TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import json_response
from holdfast.router.api.http.bodies import DetokenizeBody, TokenizeBody
from holdfast.router.api.http.chat_completions import chat_of, chat_request
from holdfast.router.api.http.messages_body import CountBody
from holdfast.router.api.http.messages_body import chat_body as messages_chat
from holdfast.router.api.http.request_reader import RequestReader, tenant_of
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.worker.errors import InvalidRequestError

T = TypeVar("T")


class TokenEndpoints:
    """Of one router. Errors are raised as `HoldfastError`."""

    def __init__(self, request_processor: RequestProcessor, reader: RequestReader) -> None:
        self._requests = request_processor
        self._reader = reader

    async def tokenize(self, request: Request) -> ASGIApp:
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
        body, _ = await self._reader.decoded(await self._reader.content(request), DetokenizeBody, _same)
        return json_response({"prompt": await self._requests.detokenize(body.model or "", body.tokens)})

    async def count_tokens(self, request: Request) -> ASGIApp:
        tenant, content = tenant_of(request), await self._reader.content(request)
        body, bare = await self._reader.decoded(
            content, CountBody, lambda one: chat_request(messages_chat(one), tenant)
        )
        plan = await self._reader.plan(bare, body.shape_field)
        assert plan.request.chat is not None, "a chat's request has one"
        token_ids = await self._requests.tokenize_chat(body.model or "", plan.request.chat)
        return json_response({"input_tokens": len(token_ids)})


def _same(body: T) -> T:
    return body
