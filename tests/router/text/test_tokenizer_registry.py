"""Long texts take turns, and give their memory back."""

import asyncio
from threading import Event

from holdfast.router.text import tokenizer_registry
from holdfast.router.text.tokenizer_registry import LONG, TokenizerRegistry
from tests.fakes import byte_tokenizer
from tests.loops import on_each_loop


class SlowCodec:
    """Waits until it is let, and counts who does."""

    vocab_size = 256
    special_token_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.may_end = Event()
        self.num_running = self.most = self.num_done = 0

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        if len(text) >= LONG:
            self.may_end.wait(60)
        self.num_running -= 1
        self.num_done += 1
        return [len(text)]


@on_each_loop
async def test_few_long_texts_are_encoded_at_a_time_and_others_go_before_and_memory_is_given_back_once(monkeypatch):
    given_back: list[int] = []
    tokenizer, codec = byte_tokenizer(), SlowCodec()
    tokenizer._codec = codec
    monkeypatch.setattr(tokenizer_registry, "GIVE_BACK_AFTER_S", 0.0)
    monkeypatch.setattr(tokenizer_registry, "give_back", lambda: given_back.append(codec.num_done))
    registry = TokenizerRegistry(lambda path: tokenizer, 100)
    await registry.load("m", "/nowhere")
    long = [asyncio.ensure_future(registry.encode("m", "x" * (LONG + number))) for number in range(8)]
    assert await registry.encode("m", "x" * 200) == (200,)
    codec.may_end.set()
    assert await asyncio.gather(*long) == [(LONG + number,) for number in range(8)]
    assert codec.most <= 3  # two long ones, and the short one
    while not given_back:
        await asyncio.sleep(0.001)
    assert given_back == [9]
