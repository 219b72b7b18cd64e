"""Chunks that are written by hand, against those that protobuf writes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.router.api.grpc.chunk_writer import ChunkEncoder, varint
from holdfast.router.generation import OutputDelta
from holdfast.router.wire.response_codec import delta_message
from holdfast.v1.inference_pb2 import GenerateStreamResponse
from tests.examples import examples

edges = st.sampled_from([0, 1, 127, 128, 2**14 - 1, 2**14, 2**21 - 1, 2**21, 2**32 - 1])
numbers = st.integers(0, 2**32 - 1) | edges
texts = st.text(max_size=12) | st.sampled_from(["", "a" * 127, "a" * 128, "é" * 8_192, "a" * 2**14])


def made(
    first: int, token_ids: tuple[int, ...], text: str, index: int, fingerprint: str, is_replayed: bool
) -> OutputDelta:
    return OutputDelta(
        "x",
        first,
        token_ids,
        text,
        sequence_index=index,
        system_fingerprint=fingerprint,
        replayed_without_guarantee=is_replayed,
    )


one_token = numbers.map(lambda token_id: (token_id,))
tokens = one_token | st.lists(numbers, max_size=3).map(tuple)
fields = (numbers, tokens, texts, st.integers(0, 1), st.sampled_from(["", "m/1"]), st.booleans())
output_deltas = st.tuples(*fields).map(lambda said: made(*said))


@settings(max_examples=examples(300))
@given(several=st.lists(output_deltas, min_size=1, max_size=4))
def test_every_chunk_reads_as_the_message_that_its_delivery_makes(several):
    encode = ChunkEncoder().encode
    for delta in several:
        assert GenerateStreamResponse.FromString(encode(delta)) == delta_message(delta)


@given(number=numbers)
def test_a_varint_is_what_protobuf_writes(number):
    written = GenerateStreamResponse(first_token_index=number).SerializeToString()
    assert written[1:] == (varint(number) if number else b"")
