"""Sender of requests: what the driver asks of a protocol, and how a protocol says what came of it. Plain data.

What may not live here: protocols (`http_sender.py`, `holdfast_sender.py`, `oip_sender.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class OnPiece(Protocol):
    def __call__(self, *, is_silent_end: bool = False) -> None:
        """A piece of output has come: one token or several. `is_silent_end`: the end of the output, without text."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `texts` alternate between what the user and what the model said; the last is the user's."""

    texts: Sequence[str]
    num_output_tokens: int

    @property
    def prompt(self) -> str:
        """Of a protocol without conversations."""
        return "\n".join(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came, once it is whole."""

    text: str = ""
    num_output_tokens: int | None = None
    """As the server counts; None: it does not say, and pieces are counted instead."""
    num_prompt_tokens: int | None = None


class SendFailed(Exception):
    """A request was not answered to the end. `kind` groups failures in reports."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Sender(Protocol):
    """Sends requests to one server, on one event loop."""

    async def send(self, ask: Ask, on_piece: OnPiece) -> Reply:
        """Raises `SendFailed`. Cancelling it gives the request up."""

    async def close(self) -> None: ...
