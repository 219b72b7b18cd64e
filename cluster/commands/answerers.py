"""Answers of a conversation, piece by piece: from an engine in this process, or from a server.

Ctrl-C ends an answer, and what there is of it counts.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.router.chat import Message
from holdfast.worker.sampling_params import SamplingParams

if TYPE_CHECKING:
    from holdfast.cluster.config.config import HoldfastConfig
    from holdfast.cluster.offline.outputs import RequestOutput

Answerer = Callable[[Sequence[Message], Callable[[str], None]], str]
"""`answer(messages, show)`: calls `show` with each new piece, and returns the whole."""


@contextmanager
def answering_here(config: "HoldfastConfig", params: SamplingParams) -> Iterator[Answerer]:
    """Loads the model first."""
    from holdfast.cluster.commands.generate import engine_here
    from holdfast.cluster.offline.prompts import chat_list

    engine = engine_here(config)

    def answer(messages: Sequence[Message], show: Callable[[str], None]) -> str:
        shown = 0

        def take(output: "RequestOutput") -> None:
            nonlocal shown
            text = output.outputs[0].text
            show(text[shown:])
            shown = len(text)

        handle = engine.submit_request(chat_list(engine.tokenizer, messages)[0].prompt, params, callback=take)
        try:
            output = handle.result()
        except KeyboardInterrupt:
            handle.cancel()
            output = handle.result()
        return str(output.outputs[0].text)

    try:
        yield answer
    finally:
        engine.stop()


@contextmanager
def answering_server(server: str, model: str, params: SamplingParams, options: Mapping[str, Any]) -> Iterator[Answerer]:
    from holdfast.cluster.client.blocking_client import Client

    with Client(server.split(","), **options) as client:

        def answer(messages: Sequence[Message], show: Callable[[str], None]) -> str:
            pieces: list[str] = []
            chunks = client.stream(messages=list(messages), params=params, model=model)
            try:
                for chunk in chunks:
                    pieces.append(chunk.text)
                    show(chunk.text)
            except KeyboardInterrupt:
                print("[ended]", file=sys.stderr)
            return "".join(pieces)

        yield answer
