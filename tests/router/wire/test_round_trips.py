"""Whatever is said over the public wire arrives as it was said: data to bytes to data."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.chat import MAX_NOW_S, Chat
from holdfast.router.generation import NO_SEQUENCE, Generation, OutputDelta, Usage
from holdfast.router.request import GenerationRequest
from holdfast.router.resume import ResumeRecord, SequenceRecord
from holdfast.router.wire import request_codec, response_codec
from holdfast.v1 import inference_pb2
from holdfast.worker.request import FinishReason, Priority, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple)
counts = st.integers(0, 2**32 - 1)
floats = st.floats(width=32, allow_nan=False)
ends = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
reasons = st.none() | st.sampled_from(FinishReason)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(texts, json_values, max_size=4)

sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.none() | st.integers(0, 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    stop=st.lists(texts.filter(bool), max_size=2),
)
turns = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts})
chats = st.builds(
    Chat,
    messages=st.lists(turns, min_size=1, max_size=3).map(tuple),
    template_kwargs=json_objects,
    now_s=st.none() | st.integers(0, MAX_NOW_S),
)
resumes = st.builds(
    ResumeRecord,
    sequences=st.lists(
        st.builds(SequenceRecord, token_ids=token_ids.map(list), text_length=counts, finish_reason=st.none() | ends),
        max_size=3,
    ),
    fingerprint=texts,
)
service = {
    "model": texts,
    "request_id": texts,
    "sampling_params": sampling,
    "priority": st.sampled_from(Priority),
    "timeout_s": st.none() | st.integers(1, 2**32 - 1).map(lambda timeout_ms: timeout_ms / 1000),
    "cache_salt": texts,
    "resume": st.none() | resumes,
    "tenant": texts,
    "cache_ttl_s": st.integers(0, 86400),
    "cache_prefix_tokens": st.integers(0, 2**31 - 1),
    "attempt": counts,
}
requests = st.builds(GenerationRequest, prompt=texts | token_ids, **service) | st.builds(
    GenerationRequest, chat=chats, **service
)

logprobs = st.builds(
    TokenLogprob,
    token_id=counts,
    logprob=floats,
    rank=counts,
    top=st.lists(st.tuples(counts, floats), max_size=2).map(tuple),
)
said = st.lists(logprobs, max_size=3).map(tuple)
said_of_prompt = said.map(lambda items: (None, *items) if items else ())
usages = st.builds(Usage, num_prompt_tokens=counts, num_completion_tokens=counts, num_cached_tokens=counts)
certainty = {"replayed_without_guarantee": st.booleans(), "system_fingerprint": texts}
in_process = {
    "num_cached_tokens": 0,
    "replica_id": "",
    "key": NO_SEQUENCE,
    "stop_reason": None,
    "chat": None,
    "pooled": b"",
}
left_out = {name: st.just(value) for name, value in in_process.items()}
chunks = st.builds(
    OutputDelta,
    **left_out,
    cumulative_logprob=st.none(),
    request_id=texts,
    sequence_index=counts,
    first_token_index=counts,
    token_ids=token_ids,
    text=texts,
    finish_reason=reasons,
    logprobs=said,
    prompt_logprobs=said_of_prompt,
    usage=st.none() | usages,
    **certainty,
)


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    of_all = {name: draw(values) for name, values in {"request_id": texts, **certainty}.items()}
    completions = st.builds(
        OutputDelta,
        **left_out,
        usage=st.none(),
        **{name: st.just(value) for name, value in of_all.items()},
        first_token_index=st.just(0),
        sequence_index=counts,
        token_ids=token_ids,
        text=texts,
        finish_reason=reasons,
        logprobs=said,
        prompt_logprobs=said_of_prompt,
        cumulative_logprob=st.none() | st.floats(allow_nan=False),
    )
    return Generation(
        request_id=of_all["request_id"],
        model=draw(texts),
        completions=draw(st.lists(completions, min_size=1, max_size=3).map(tuple)),
        usage=draw(usages),
    )


@given(requests)
def test_requests(request):
    data = request_codec.generation_request_message(request).SerializeToString()
    assert request_codec.generation_request(inference_pb2.GenerateRequest.FromString(data)) == request


@given(chunks)
def test_chunks(chunk):
    data = response_codec.delta_message(chunk).SerializeToString()
    assert response_codec.output_delta(inference_pb2.GenerateStreamResponse.FromString(data)) == chunk


@given(generations())
def test_generations(generation):
    data = response_codec.generation_message(generation).SerializeToString()
    assert response_codec.generation(inference_pb2.GenerateResponse.FromString(data)) == generation


def test_variables_of_a_template_keep_their_order_and_their_types():
    """A template that writes or counts them makes another prompt otherwise."""
    values = {"z": 3, "a": 2.5, "yes": True, "deep": {"b": [1, 2**60], "a": None}}
    request = GenerationRequest(chat=Chat(messages=[{"role": "user", "content": ""}], template_kwargs=values))
    again = request_codec.generation_request(request_codec.generation_request_message(request))
    assert repr(again.chat.template_kwargs) == repr(values)


def test_every_field_of_the_messages_is_carried():
    """A field that is in the proto alone would be left behind both ways, and no round trip would tell."""
    delta, of_stream = {*OutputDelta._fields}, {"request_id", "first_token_index", "usage"}
    of_all = {"replayed_without_guarantee", "system_fingerprint"}
    filled = {
        inference_pb2.GenerateRequest: {*GenerationRequest.__dataclass_fields__},
        inference_pb2.GenerateStreamResponse: delta - (in_process.keys() - {"chat"}) - {"cumulative_logprob"},
        inference_pb2.GenerateResponse: {*Generation.__dataclass_fields__} - {"candidates"} | of_all,
        inference_pb2.Completion: delta - (in_process.keys() - {"chat"}) - of_all - of_stream,
        inference_pb2.Chat: {*Chat.__dataclass_fields__},
    }
    renamed = {"text": "prompt", "token_ids": "prompt", "timeout_ms": "timeout_s"}
    for message, names in filled.items():
        for field in message.DESCRIPTOR.fields:
            is_known = field.name in names or renamed.get(field.name) in names
            assert is_known, f"{message.__name__}.{field.name}"
