"""Without parallel calls: one call is read of an output, whatever the model writes, and nothing of what follows it."""

import pytest

from holdfast.router.tools.call_events import CallArguments, CallBegin, CallEnd, Content, merged
from holdfast.router.tools.chat_style import ChatReader, ChatStyle
from holdfast.router.tools.tools import Tool

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ONE = [CallBegin(0, "f"), CallArguments(0, "{}"), CallEnd(0)]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (CALL, ONE),
        (f"{CALL}\n{CALL}", ONE),
        (f"{CALL}\n{CALL}\n{CALL} and more", ONE),
        (f"{CALL}\n{CALL[:40]}", ONE),
        (f"{CALL}\n{CALL[:20]}", ONE),
        (f"So: {CALL}\nDone. {CALL}", [Content("So: "), *ONE, Content("\nDone. ")]),
    ],
)
def test_one_call_is_read(text: str, events: list[object]):
    for pieces in ([text], list(text)):
        reader = ChatReader(
            ChatStyle(call_format="hermes"),
            [Tool(name="f")],
            splits=False,
            begins_inside=False,
            is_filtered=False,
            is_parallel=False,
        )
        read = [event for piece in pieces for event in reader.push(piece)] + reader.finish()
        assert merged(read) == events
        assert reader.num_calls == 1
