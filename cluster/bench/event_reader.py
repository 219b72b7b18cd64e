"""Reader of an OpenAI-style event stream: bytes as they come, to pieces of output and a reply. No IO.

What may not live here: connections (`http_sender.py`).
"""

import json
from typing import Any, Final

from holdfast.cluster.bench.sender import OnPiece, Reply, SendFailed

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class EventReader:
    """Of one answer. A piece is an event with text, thoughts or calls: what users see first, and what TTFT means.

    An output that ends with a token without text, such as an end-of-sequence token, is over at that token's event.
    """

    def __init__(self, on_piece: OnPiece) -> None:
        self._on_piece = on_piece
        self._rest = b""
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._is_over = False

    def feed(self, data: bytes) -> None:
        """Raises `SendFailed` where the server says an error, or something that is no event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._event(line[len(_DATA) :].strip())

    def reply(self) -> Reply:
        """When the stream has ended. Raises `SendFailed` if it was cut off."""
        if not self._is_over:
            raise SendFailed("cut off", "the stream ended before the answer did")
        return Reply(
            text="".join(self._texts),
            num_output_tokens=self._usage.get("completion_tokens"),
            num_prompt_tokens=self._usage.get("prompt_tokens"),
        )

    def _event(self, data: bytes) -> None:
        if data == _DONE:
            self._is_over = True
            return
        try:
            event = json.loads(data)
            error = event.get("error")
            choices = event.get("choices") or ()
        except (ValueError, AttributeError):
            raise SendFailed("unreadable", f"an event that is no JSON object: {data[:80]!r}") from None
        if error:
            raise SendFailed("error in the stream", message_of(event))
        self._usage = event.get("usage") or self._usage
        for choice in choices:
            if text := _text_of(choice):
                self._texts.append(text if isinstance(text, str) else "")
                self._on_piece()
            if choice.get("finish_reason") is not None:
                self._is_over = True
                if not text:
                    self._on_piece(is_silent_end=True)


def _text_of(choice: dict[str, Any]) -> Any:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text")
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")


def message_of(body: Any) -> str:
    """What an OpenAI-style error says."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)
