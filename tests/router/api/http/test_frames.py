"""Events whose frame was made before, against those that are made as a whole; and what is written past ASGI."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.router.api.http.bodies import ChatBody, CompletionBody
from holdfast.router.api.http.chat_completions import ChatChunks, ChatView
from holdfast.router.api.http.completions import Completions
from holdfast.router.api.http.event_stream import DONE
from holdfast.router.api.http.submission import Encoder, Submission, encoded
from holdfast.router.dispatch.request_stream import OutputStream
from holdfast.router.generation import OutputDelta, Usage
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.resume import Identity
from holdfast.worker.request import FinishReason, SequenceKey, TokenLogprob
from tests import loops
from tests.examples import examples
from tests.fakes import byte_tokenizer
from tests.router.answers import new_answer, read_from

OPTIONS = [{}, {"stream_options": {"include_usage": True}}, {"n": 2}]
SAID = TokenLogprob(token_id=7, logprob=-1.5, rank=3, top=())


def answer(stream: OutputStream | None = None) -> SampledAnswer:
    made = new_answer("x", 'm "quoted"')
    read_from(made, [OutputStream(SequenceKey("", "x"), made) if stream is None else stream])
    return made


def chat(fields: dict, one: SampledAnswer) -> Encoder:
    body = ChatBody.made({"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields})
    view = ChatView(body=body, created=1_700_000_000, tokens=byte_tokenizer().tokens, new_reader=lambda: None)
    return ChatChunks(view, one)


def completion(fields: dict, one: SampledAnswer) -> Encoder:
    body = CompletionBody.made({"prompt": "hi", "stream": True, **fields})
    return Completions(body, [one], 1_700_000_000, byte_tokenizer())


def piece(index: int, text: str, choice: int = 0, fingerprint: str = "m/1", **fields) -> OutputDelta:
    return OutputDelta("x", index, (7,), text, sequence_index=choice, system_fingerprint=fingerprint, **fields)


def objects(events: bytes) -> list:
    """No content and an empty one say the same. Of a delta without text there may be none."""
    if not events:
        return []
    assert events.endswith(b"\n\n")
    heard = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2].split(b"\n\n")]
    for choice in (choice for event in heard for choice in event["choices"] if "delta" in choice):
        choice["delta"].setdefault("content", "")
    return heard


pieces = st.lists(
    st.tuples(
        st.text(max_size=20) | st.sampled_from(["", '"', "\\", "\n\n", "\x00", "\u2028", "é🙂", "\ud800"]),
        st.integers(0, 1),
        st.sampled_from(["m/1", "m/1", "m/2", ""]),
        st.booleans(),
    ),
    max_size=6,
)


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("fields", OPTIONS)
@settings(max_examples=examples(60))
@given(said=pieces)
def test_an_event_in_a_frame_reads_as_the_event_that_is_made_as_a_whole(make, fields, said):
    async def run() -> None:
        framed, whole = make(fields, answer()), make(fields, answer())
        whole.plain = lambda delta: None
        for index, (text, choice, fingerprint, has_logprobs) in enumerate(said):
            one = piece(index, text, choice % fields.get("n", 1), fingerprint, logprobs=(SAID,) if has_logprobs else ())
            assert objects(framed.plain(one) or framed.of(one)) == objects(whole.of(one))

    loops.run(run(), "asyncio")


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    "fields",
    [{"return_token_ids": True}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}],
    ids=str,
)
def test_what_says_more_than_text_has_no_frame(make, fields):
    async def run() -> None:
        encoder = make(fields, answer())
        encoder.of(piece(0, "a"))
        assert encoder.plain(piece(1, "b")) is None

    loops.run(run(), "asyncio")


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_what_the_socket_does_not_take_waits_and_nothing_overtakes_it():
    async def run() -> None:
        one = new_answer("x")
        stream = OutputStream(SequenceKey("", "x"), one)
        read_from(one, [stream])
        encoder = chat({}, one)
        written, takes = [], [True]

        class Socket:
            write_chunk = written.append

            def takes_chunks(self) -> bool:
                return takes[0]

        gate = asyncio.Event()
        gate.set()

        async def read() -> None:
            async for events in encoded(one, encoder, Submission(identity=Identity("x", 0)), [one], Socket()):
                written.append(events)
                await gate.wait()  # as a `send` that waits for the client

        reading = asyncio.create_task(read())
        await turns()
        stream.push(piece(0, "a"))  # the first one has the role before it, and goes the usual way
        assert not written
        await turns()
        stream.push(piece(1, "b"))
        assert len(written) == 2, "written at once"
        takes[0] = False
        stream.push(piece(2, "c"))
        takes[0] = True
        stream.push(piece(3, "d"))
        assert len(written) == 2, "what waits goes first"
        gate.clear()
        await turns()
        stream.push(piece(4, "e"))
        stream.push(
            piece(5, "f", finish_reason=FinishReason.STOP, usage=Usage(num_prompt_tokens=1, num_completion_tokens=6))
        )
        gate.set()
        await reading
        heard = [event for events in written for event in objects(events.removesuffix(DONE))]
        text = "".join(choice["delta"].get("content", "") for event in heard for choice in event["choices"])
        assert (text, len(written), stream.num_tokens) == ("abcdef", 4, 6)

    loops.run(run(), "asyncio")
