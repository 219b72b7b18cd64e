"""Tokenizer registry: one tokenizer for each served model, loaded once, run on a thread for large inputs."""

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Final, ParamSpec, TypeVar

from holdfast.router.chat import Chat
from holdfast.router.config import LimitsConfig
from holdfast.router.events import ModelStatus
from holdfast.router.request import GenerationRequest, check_text
from holdfast.router.text.chat import FEW_STEPS, TemplateBudgetError, chat_text, mark_places, template_traits
from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.prompt import (
    check_encoded,
    check_length,
    check_prompt_logprobs,
    check_vocabulary,
    echoed_text,
    kept_of_pair,
    kept_tokens,
    pooled,
    resolved,
    with_counted_logprobs,
)
from holdfast.router.text.tokenizer import EncodedPair, Tokenizer, TooManyTokensError
from holdfast.worker.errors import ConfigurationError, InvalidRequestError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.parameters import ALL_LOGPROBS
from holdfast.worker.process_memory import give_back
from holdfast.worker.request import EngineRequest, KeptPrefix
from holdfast.worker.structured_outputs import StructuredOutputs

P = ParamSpec("P")
T = TypeVar("T")

LONG: Final = 2**16
"""Characters of a text that is long: it takes a tenth of a second and 250 times its size in memory."""

LONG_AT_ONCE: Final = 2
"""More of them wait, so that others find a thread, and memory stays within limits."""

FEW_PARTS: Final = 2**8
"""Values of a chat, at any depth, that is checked and rendered on the event loop: a message of two takes 10 us."""

GRAMMARS_AT_ONCE: Final = 2
"""More of them wait: each thread that wants Python's lock is one more that an event loop waits for."""

GIVE_BACK_AFTER_S: Final = 0.5
"""Called after the last of them: then the tokenized text is gone too."""


class TokenizerRegistry:
    """Tokenizers and grammar compilers by model name."""

    def __init__(self, load: Callable[[str], Tokenizer], inline_bytes: int) -> None:
        self._load = load
        self._inline_bytes = inline_bytes
        self._tokenizers: dict[str, Tokenizer] = {}
        self._compilers: dict[str, GrammarCompiler] = {}
        self._sources: dict[str, tuple[str, str]] = {}
        """Folder and configured chat template by model."""
        self._loading = asyncio.Lock()
        self._long = asyncio.Semaphore(LONG_AT_ONCE)
        self._num_long = 0
        self._interpreted = ThreadPoolExecutor(1, thread_name_prefix="text")
        """Runs functions that hold Python's lock, one at a time: each of them delays the event loop."""
        self._grammars = ThreadPoolExecutor(GRAMMARS_AT_ONCE, thread_name_prefix="grammar")

    def __getitem__(self, model: str) -> Tokenizer:
        return self._tokenizers[model]

    async def load(self, model: str, path: str, chat_template: str = "") -> None:
        """Loads the tokenizer of a model, unless it is loaded from there: another model may take a removed one's name.

        `chat_template` takes the place of the tokenizer's own, unless it is empty. Raises what loading raises.
        """
        source = path, chat_template
        async with self._loading:
            if self._sources.get(model) != source:
                tokenizer = await asyncio.to_thread(self._load, path)
                if chat_template:
                    tokenizer = tokenizer.with_chat_template(chat_template)
                await self.apart(_probe_templates, tokenizer)
                self._tokenizers[model] = tokenizer
                self._compilers[model] = GrammarCompiler(tokenizer)
                self._sources[model] = source

    async def encode(
        self, model: str, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text. A long text takes milliseconds, so it is encoded on a thread.

        Raises `TooManyTokensError` for more than `most`.
        """
        tokenizer = self._tokenizers[model]
        return await self._encoded(len(text), lambda: tuple(tokenizer.encode(text, add_special_tokens, most)))

    async def beginning(self, model: str, text: str, num_tokens: int) -> str:
        """Same as `Tokenizer.beginning`."""
        tokenizer = self._tokenizers[model]
        return await self._encoded(len(text), lambda: tokenizer.beginning(text, num_tokens))

    async def _encoded(self, length: int, encode: Callable[[], T]) -> T:
        """Result of `encode`, of texts with this many characters: on a thread, unless they are short."""
        if length <= self._inline_bytes:
            return encode()
        if length < LONG:
            return await asyncio.to_thread(encode)
        self._num_long += 1
        try:
            async with self._long:
                return await asyncio.to_thread(encode)
        finally:
            self._num_long -= 1
            if not self._num_long:
                asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        """Returns the memory of long texts to the system."""
        if not self._num_long:
            asyncio.get_running_loop().run_in_executor(None, give_back)

    async def render(self, model: str, chat: Chat) -> str:
        """Same as `chat_text`. A template that takes more than a few steps is run again on a thread."""
        tokenizer = self._tokenizers[model]
        if chat.is_short(FEW_PARTS, self._inline_bytes):
            with suppress(TemplateBudgetError):
                return chat_text(tokenizer, chat, FEW_STEPS)
        return await self.apart(chat_text, tokenizer, chat)

    async def bad_words(self, model: str, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Same as `bad_word_token_ids`."""
        tokenizer = self._tokenizers[model]
        if 2 * sum(map(len, words)) <= self._inline_bytes:
            return bad_word_token_ids(tokenizer, words)
        return await self.apart(bad_word_token_ids, tokenizer, words)

    async def apart(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Result of `function`, off the event loop; one at a time, for work that holds Python's lock."""
        call = partial(copy_context().run, function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._interpreted, call)

    async def check(self, chat: Chat | None, check: Callable[[LimitsConfig], None], limits: LimitsConfig) -> None:
        """Runs a check of a chat, or of a request with one: off the event loop for many values or long texts."""
        if chat is None or chat.is_short(FEW_PARTS, self._inline_bytes):
            check(limits)
        else:
            await self.apart(check, limits)

    async def grammar(self, model: str, structure: StructuredOutputs) -> str:
        """Same as `GrammarCompiler.compile`, always on a thread: its time cannot be predicted."""
        compile_, loop = self._compilers[model].compile, asyncio.get_running_loop()
        return await loop.run_in_executor(self._grammars, compile_, structure)

    async def check_output(
        self, model: str, field: str, grammar: str, token_ids: Sequence[int], eos_token_ids: Collection[int]
    ) -> None:
        """Same as `GrammarCompiler.check_output`; does nothing without a grammar."""
        if grammar:
            check = self._compilers[model].check_output
            await asyncio.to_thread(check, field, grammar, token_ids, eos_token_ids)

    async def engine_request(
        self, request: GenerationRequest, model: ModelStatus, limits: LimitsConfig
    ) -> EngineRequest:
        """A client's request in tokens, as engines take it, with an id and a seed. Raises `InvalidRequestError` for
        input that the model does not accept.
        """
        name, facts, params = model.name, model.facts, request.sampling_params
        if request.pooling is not None or facts.pooling is not None:
            request = pooled(request, facts)
        if ALL_LOGPROBS in (params.logprobs, params.prompt_logprobs):
            params = with_counted_logprobs(params, facts.vocab_size, limits.max_logprobs)
        text = request.prompt if request.chat is None else await self._chat_text(request.chat, name, limits)
        longest = facts.max_sequence_len + (request.pooling is not None)
        second_start = 0
        if request.second_text is None:
            token_ids = await self._prompt_token_ids(request, text, model)
        else:
            pair = await self._pair(request, model)
            token_ids, second_start = kept_of_pair(pair, params, longest)
        cache_marks: tuple[KeptPrefix, ...] = ()
        if request.chat is not None and request.chat.marks and isinstance(text, str):
            cache_marks = await self._cache_marks(name, request.chat, text, len(token_ids))
        if params.truncate_prompt_tokens is not None and request.second_text is None:
            is_text = request.pooling is not None and isinstance(text, str)
            around = self._tokenizers[name].encode("") if is_text else ()
            token_ids = kept_tokens(token_ids, params, longest, around)
        check_length(request, len(token_ids), facts)
        if params.prompt_logprobs is not None:
            check_prompt_logprobs(params, len(token_ids))
        if request.chat is None and not isinstance(request.prompt, str):
            check_vocabulary("token_ids", token_ids, facts.vocab_size)  # not of more than a model takes
        else:
            check_encoded(request, token_ids, self._tokenizers[name], facts.vocab_size)
        request_id, shape = request.request_id or uuid.uuid4().hex, params.structure
        params = resolved(params, request.seed_key or request_id, facts)
        bad_words = await self.bad_words(name, params.bad_words) if params.bad_words else ()
        return EngineRequest(
            request_id=request_id,
            part=request.part,
            prompt_token_ids=token_ids,
            sampling_params=params,
            pooling=request.pooling,
            second_start=second_start,
            **request.service,
            cache_marks=cache_marks if params.truncate_prompt_tokens is None else (),
            # Of a token beyond the model's vocabulary there is no logit.
            bad_word_token_ids=tuple([word for word in bad_words if max(word) < facts.vocab_size]) if bad_words else (),
            grammar="" if shape is None else await self.grammar(name, shape),
        )

    async def _cache_marks(self, model: str, chat: Chat, text: str, num_tokens: int) -> tuple[KeptPrefix, ...]:
        """Tokens of the prompt up to each mark of a chat: exact where a token begins behind the mark, as between
        messages, and else to a token. A mark whose place the template does not show stands for the whole prompt.
        """
        places = await self.apart(mark_places, self._tokenizers[model], chat, text)
        counts = {0: 0, len(text): num_tokens}
        before = 0
        for place in sorted({place for place in places if place is not None} - counts.keys()):
            counts[place] = counts[before] + len(await self.encode(model, text[before:place], False))
            before = place
        marks = zip(chat.marks, places, strict=True)
        kept = [(num_tokens if at is None else min(counts[at], num_tokens), mark.ttl_s) for mark, at in marks]
        return tuple([KeptPrefix(count, ttl_s) for count, ttl_s in kept if count])

    async def _chat_text(self, chat: Chat, model: str, limits: LimitsConfig) -> str:
        """The prompt of a chat as its template writes it."""
        text = await self.render(model, chat)
        check_text(text, limits, "chat")  # a template adds to each message
        return text

    async def _prompt_token_ids(
        self, request: GenerationRequest, text: str | tuple[int, ...], model: ModelStatus
    ) -> tuple[int, ...]:
        """The token ids of the whole prompt, before truncation."""
        if not isinstance(text, str):
            return text
        with _checking_length(request, model.facts) as most:
            return await self.encode(model.name, text, request.chat is None, most)

    async def _pair(self, request: GenerationRequest, model: ModelStatus) -> EncodedPair:
        """The tokens of two texts, before truncation."""
        first, second, encode = str(request.prompt), request.second_text or "", self._tokenizers[model.name].encode_pair
        with _checking_length(request, model.facts) as most:
            return await self._encoded(len(first) + len(second), lambda: encode(first, second, most))

    async def echo(self, model: str, asked: GenerationRequest, request: EngineRequest) -> str:
        """The text that `echo` puts before the output of the original request, which has become `request`; of a chat,
        the rendered prompt.
        """
        prompt = asked.prompt if asked.chat is None else request.prompt_token_ids
        arguments = self._tokenizers[model], prompt, request.prompt_token_ids, request.sampling_params
        if 4 * len(request.prompt_token_ids) <= self._inline_bytes:
            return echoed_text(*arguments)
        return await self.apart(echoed_text, *arguments)

    async def decode(self, model: str, token_ids: tuple[int, ...]) -> str:
        """The text of token ids, special tokens included. Four bytes are assumed for each to decide where to decode."""
        tokenizer = self._tokenizers[model]
        if 4 * len(token_ids) <= self._inline_bytes:
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        return await asyncio.to_thread(tokenizer.decode, token_ids, skip_special_tokens=False)


@contextmanager
def _checking_length(request: GenerationRequest, facts: ModelInfo) -> Iterator[int | None]:
    """The most tokens that a prompt may have, None if it is cut. Raises `InvalidRequestError` for more."""
    try:
        yield facts.max_sequence_len if request.sampling_params.truncate_prompt_tokens is None else None
    except TooManyTokensError as error:
        num_tokens = error.num_tokens
    else:
        return
    check_length(request, num_tokens, facts)
    raise AssertionError("a prompt beyond the model's length has passed")


def _probe_templates(tokenizer: Tokenizer) -> None:
    """Finds the traits of the chat templates out, before the first chat waits for them. A template that does not
    compile is reported by the chats that use it.
    """
    for template in tokenizer.chat_templates.values():
        with suppress(ConfigurationError):
            template_traits(template, tokenizer.special_tokens)


def bad_word_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word at the start of a text and after a space, without repeats.

    Only these spellings are banned: a model may still compose a word of other tokens. Raises `InvalidRequestError` for
    a word that has no tokens.
    """
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not token_ids:
                raise InvalidRequestError(
                    "sampling_params.bad_words", word, "the model's tokenizer has no tokens for it"
                )
            spellings[token_ids] = None
    return tuple(spellings)
