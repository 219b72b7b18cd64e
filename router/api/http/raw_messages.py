"""What a response tells of its prompt and output as the model has them, with `enable_response_messages`."""

from collections.abc import Sequence
from typing import Any

from holdfast.router.events import OutputDelta


class RawMessages:
    """Of one response, as its output comes."""

    def __init__(self, prompt_text: str, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = _message(prompt_text, prompt_token_ids)
        self._text = ""
        self._token_ids: list[int] = []

    def push(self, delta: OutputDelta) -> None:
        self._text += delta.text
        self._token_ids += delta.token_ids

    def fields(self) -> dict[str, Any]:
        """Of the response object at its end."""
        return {"input_messages": [self._prompt], "output_messages": [_message(self._text, self._token_ids)]}


def _message(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}
