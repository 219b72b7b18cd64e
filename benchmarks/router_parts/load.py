"""The load of all parts: one text that every stream streams, token by token, and the chunks that carry it."""

import functools
from pathlib import Path
from typing import Final

from holdfast.cluster.bundled_model.bundled_model import BUNDLED, bundled_path
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.v1 import inference_pb2
from holdfast.worker.model_info import ModelInfo

TEXT: Final = "Once upon a time, there was a little girl who lived in a small house near the big forest. "
FINISHED: Final = 2
PREFIX_TOKENS: Final = 128
PROMPT: Final = "Tell me a story."


def model_path() -> Path:
    return bundled_path(BUNDLED)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(model_path()))


@functools.cache
def text_tokens() -> tuple[int, ...]:
    return tuple(tokenizer().encode(TEXT * 8, add_special_tokens=False))


def token_at(index: int) -> int:
    """The token that every stream has at an output position."""
    tokens = text_tokens()
    return tokens[index % len(tokens)]


@functools.cache
def info() -> ModelInfo:
    """Of a replica that has no model, but reports one."""
    return ModelInfo(
        model=BUNDLED,
        path=str(model_path()),
        model_type="llama",
        max_model_len=100_000,
        vocab_size=tokenizer().vocab_size,
        eos_token_ids=frozenset(),
        dtype="bfloat16",
        tensor_parallel_size=1,
        block_size=16,
        num_blocks=100_000,
        kv_bytes_per_token=1024,
        row_invariant=True,
        device="cpu",
        executor="native-cpu-1",
        checkpoint_digest="0123456789abcdef",
        answers_digest=b"01234567",
    )


def prefixed_prompt(number: int, tail: int | None = None) -> tuple[int, ...]:
    """A prompt that begins with one of many prefixes of `PREFIX_TOKENS`; with a `tail`, as many tokens follow."""
    most = tokenizer().vocab_size
    name = (number % most, number // most, *(index % most for index in range(PREFIX_TOKENS - 2)))
    own = () if tail is None else (tail % most, tail // most, *(index % most for index in range(PREFIX_TOKENS - 2)))
    return name + own


@functools.lru_cache(maxsize=4)
def prepared(num_tokens: int) -> tuple[bytes, ...]:
    """The chunks of one stream as bytes, as a router would send them: one token each, the last with the usage."""
    texts = [f" {tokenizer().decode((token_at(index),), True).strip()}" for index in range(num_tokens)]
    chunks = [
        inference_pb2.GenerateStreamResponse(
            request_id="0123456789abcdef0123456789abcdef",
            first_token_index=index,
            token_ids=[token_at(index)],
            text=text,
            system_fingerprint=info().fingerprint,
        )
        for index, text in enumerate(texts)
    ]
    chunks[-1].finish_reason = FINISHED  # type: ignore[assignment]  # LENGTH
    chunks[-1].usage.CopyFrom(inference_pb2.Usage(prompt_tokens=4, completion_tokens=num_tokens))
    return tuple(chunk.SerializeToString() for chunk in chunks)
