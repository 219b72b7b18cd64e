"""Blocks of an output: its text, thoughts and calls one after the other, as Anthropic and OpenAI's newer API have it.

What may not live here: how a vendor's events tell of them (`messages.py`, `responses.py`), reading (`router/tools/`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from holdfast.router.events import Deliver
from holdfast.router.tools.call_events import CallArguments, CallBegin, CallEnd, CallEvent, Content
from holdfast.router.tools.chat_style import ChatReader, Reasoning
from holdfast.worker.request import TokenLogprob

Kind: TypeAlias = Literal["text", "thinking", "call"]


@dataclass(slots=True)
class Block:
    """One block, as far as it is known."""

    kind: Kind
    index: int
    """Among the blocks of the output."""
    name: str = ""
    """Of a called function."""
    call_index: int = 0
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of a text's tokens."""

    @property
    def text(self) -> str:
        """Text, thoughts, or a call's arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A block begins, goes on with a piece, or ends."""

    what: Literal["begin", "more", "end"]
    block: Block
    piece: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    """Of the tokens that have come with the piece of a text."""


class Blocks:
    """The blocks of one output, as it comes."""

    def __init__(self, reader: ChatReader | None) -> None:
        """Without a reader all is text."""
        self._reader = reader
        self._current: Block | None = None
        self._logprobs: list[TokenLogprob] = []
        """Of tokens whose text has not come yet."""
        self.blocks: list[Block] = []

    @property
    def num_calls(self) -> int:
        return 0 if self._reader is None else self._reader.num_calls

    def push(self, delivery: Deliver) -> Iterator[BlockEvent]:
        """What a delivery comes to. At the end all blocks are closed, and there is one at least."""
        self._logprobs += delivery.logprobs
        for event in self._read(delivery):
            if isinstance(event, Reasoning):
                self._logprobs.clear()
                yield from self._more("thinking", event.text)
            elif isinstance(event, Content):
                yield from self._more("text", event.text, self._of_text())
            elif isinstance(event, CallBegin):
                self._logprobs.clear()
                yield from self._begin("call", event.name, event.index)
            elif isinstance(event, CallArguments):
                yield from self._more("call", event.json)
            elif isinstance(event, CallEnd):
                yield from self._end()
        if delivery.finish_reason is not None:
            if not self.blocks:
                yield from self._begin("text")
            yield from self._end()

    def _read(self, delivery: Deliver) -> Iterable[Reasoning | CallEvent]:
        if self._reader is None:
            return [Content(delivery.text)] if delivery.text else []
        read = self._reader.push(delivery.text)
        return read + self._reader.finish() if delivery.finish_reason is not None else read

    def _of_text(self) -> Sequence[TokenLogprob]:
        """Those that came with a delivery, and with deliveries that were no text yet: once."""
        told, self._logprobs = self._logprobs, []
        return told

    def _more(self, kind: Kind, piece: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[BlockEvent]:
        if not piece:
            return
        if self._current is None or self._current.kind != kind:
            yield from self._begin(kind)
        assert self._current is not None, "a block has begun"
        self._current.pieces.append(piece)
        self._current.logprobs += logprobs
        yield BlockEvent("more", self._current, piece, logprobs)

    def _begin(self, kind: Kind, name: str = "", call_index: int = 0) -> Iterator[BlockEvent]:
        yield from self._end()
        self._current = Block(kind, len(self.blocks), name, call_index)
        self.blocks.append(self._current)
        yield BlockEvent("begin", self._current)

    def _end(self) -> Iterator[BlockEvent]:
        block, self._current = self._current, None
        if block is not None:
            yield BlockEvent("end", block)
