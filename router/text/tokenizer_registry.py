"""The tokenizers of the models that are served here, each loaded once, and used off the event loop for large texts."""

import asyncio
from collections.abc import Callable, Collection, Sequence

from holdfast.router.chat import Chat
from holdfast.router.text.chat import chat_text
from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.prompt import echoed_text
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.vocabulary import bad_word_token_ids
from holdfast.worker.request import EngineRequest
from holdfast.worker.structured_outputs import StructuredOutputs


class TokenizerRegistry:
    """Tokenizers by model name."""

    def __init__(self, load: Callable[[str], Tokenizer], inline_bytes: int) -> None:
        self._load = load
        self._inline_bytes = inline_bytes
        self._tokenizers: dict[str, Tokenizer] = {}
        self._compilers: dict[str, GrammarCompiler] = {}
        self._loading = asyncio.Lock()

    def __getitem__(self, model: str) -> Tokenizer:
        return self._tokenizers[model]

    async def load(self, model: str, path: str) -> None:
        """Has the tokenizer of a model at hand from here on. Raises what loading raises."""
        async with self._loading:
            if model not in self._tokenizers:
                tokenizer = await asyncio.to_thread(self._load, path)
                self._tokenizers[model] = tokenizer
                self._compilers[model] = GrammarCompiler(tokenizer)

    async def encode(self, model: str, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """A long text takes milliseconds, which other streams should not have to wait."""
        tokenizer = self._tokenizers[model]
        if len(text) <= self._inline_bytes:
            return tuple(tokenizer.encode(text, add_special_tokens))
        return tuple(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens))

    async def render(self, model: str, chat: Chat) -> str:
        """As `chat_text`: the prompt's text, its special tokens in it."""
        tokenizer = self._tokenizers[model]
        if chat.num_bytes <= self._inline_bytes:
            return chat_text(tokenizer, chat)
        return await asyncio.to_thread(chat_text, tokenizer, chat)

    async def bad_words(self, model: str, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """As `bad_word_token_ids`."""
        tokenizer = self._tokenizers[model]
        if 2 * sum(map(len, words)) <= self._inline_bytes:
            return bad_word_token_ids(tokenizer, words)
        return await asyncio.to_thread(bad_word_token_ids, tokenizer, words)

    async def grammar(self, model: str, structure: StructuredOutputs | None) -> str:
        """As `GrammarCompiler.compile`, which is short or long work, and nobody can tell before."""
        return "" if structure is None else await asyncio.to_thread(self._compilers[model].compile, structure)

    async def check_output(
        self, model: str, field: str, grammar: str, token_ids: Sequence[int], eos_token_ids: Collection[int]
    ) -> None:
        """As `GrammarCompiler.check_output`; nothing without a grammar."""
        if grammar:
            check = self._compilers[model].check_output
            await asyncio.to_thread(check, field, grammar, token_ids, eos_token_ids)

    async def echo(self, model: str, prompt: str | tuple[int, ...], request: EngineRequest) -> str:
        """As `echoed_text`, for a request that was made of `prompt`."""
        arguments = self._tokenizers[model], prompt, request.prompt_token_ids, request.sampling_params
        if 4 * len(request.prompt_token_ids) <= self._inline_bytes:
            return echoed_text(*arguments)
        return await asyncio.to_thread(echoed_text, *arguments)

    async def decode(self, model: str, token_ids: tuple[int, ...]) -> str:
        """Four bytes a token, as a rule of thumb, for what may be done on the event loop."""
        tokenizer = self._tokenizers[model]
        if 4 * len(token_ids) <= self._inline_bytes:
            return tokenizer.decode(token_ids)
        return await asyncio.to_thread(tokenizer.decode, token_ids)
