"""What the engine in one process refuses: field and message for each kind of bad input, as a router does.

Whatever is thrown at it is answered, or refused by an error of Holdfast's own, and later calls are answered.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from holdfast.cluster.client.submissions import submission
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.offline.outputs import BeamSearchParams
from holdfast.worker.errors import CallerError, CapacityError, DeadlineExceededError, InvalidRequestError
from holdfast.worker.parameters import BIASES, TOKEN_IDS
from holdfast.worker.parameters import WHOLE as WHOLE_NUMBER
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs
from tests.examples import examples
from tests.router.api.test_whole_numbers import WHOLE

SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
HALF = "a\ud800"
HUGE = 10**5000
"""Python does not even write it out."""

BAD_PROMPTS = {
    "None": (None, "prompt", "text or a list of token ids"),
    "a number": (5, "prompt", "text or a list of token ids"),
    "a float": (1.5, "prompt", "text or a list of token ids"),
    "bytes": (b"abc", "prompt", "text or a list of token ids"),
    "a byte array": (bytearray(b"abc"), "prompt", "text or a list of token ids"),
    "a set": ({1, 2}, "prompt", "text or a list of token ids"),
    "an array": (numpy.array([1, 2]), "prompt", "text or a list of token ids"),
    "half a character": (HALF, "text", "valid Unicode"),
    "an empty text": ("", "text", "must not be empty"),
    "no token ids": ([], "token_ids", "must not be empty"),
    "flags": ([True, False], "token_ids", "whole numbers"),
    "floats": ([1.0], "token_ids", "whole numbers"),
    "texts": (["a"], "token_ids", "whole numbers"),
    "lists": ([[1]], "token_ids", "whole numbers"),
    "nothing": ([5, None], "token_ids", "whole numbers"),
    "a negative id": ([-1], "token_ids", "must not be negative"),
    "an id beyond the vocabulary": ([258], "token_ids", "vocabulary size, 258"),
    "an id beyond numbers": ([HUGE], "token_ids", "vocabulary size, 258"),
    "a numpy id beyond the vocabulary": ([numpy.int64(300)], "token_ids", "vocabulary size, 258"),
    "longer than the context": ("x" * 1000, "text", "maximum context length is 256 tokens"),
    "1 MB": ("x" * 10**6, "text", "limits.max_prompt_bytes"),
}
BAD_OPTIONS = {
    "a number for a priority": ({"priority": 0}, "priority", "Priority.CRITICAL"),
    "a name for a priority": ({"priority": "high"}, "priority", "Priority.CRITICAL"),
    "no priority": ({"priority": None}, "priority", "Priority.CRITICAL"),
    "a list of priorities": ({"priority": [Priority.LOW]}, "priority", "Priority.CRITICAL"),
    "no tenant": ({"tenant": None}, "tenant", "must be text"),
    "a number for a tenant": ({"tenant": 5}, "tenant", "must be text"),
    "half a tenant": ({"tenant": HALF}, "tenant", "valid Unicode"),
    "a long tenant": ({"tenant": "x" * 129}, "tenant", "at most 128"),
    "a salt of bytes": ({"cache_salt": b"salt"}, "cache_salt", "must be text"),
    "half a salt": ({"cache_salt": HALF}, "cache_salt", "valid Unicode"),
    "a long salt": ({"cache_salt": "x" * 129}, "cache_salt", "at most 128"),
    "a time to be kept in words": ({"cache_ttl_s": "60"}, "cache_ttl_s", "from 0 to 86400"),
    "a timeout of zero": ({"timeout_s": 0}, "timeout_s", "above 0"),
    "a timeout in the past": ({"timeout_s": -1.0}, "timeout_s", "above 0"),
    "a timeout that is none": ({"timeout_s": math.nan}, "timeout_s", "number of seconds"),
    "a timeout in words": ({"timeout_s": "60"}, "timeout_s", "number of seconds"),
    "a timeout that is true": ({"timeout_s": True}, "timeout_s", "number of seconds"),
    "a timeout for ever": ({"timeout_s": math.inf}, "timeout_ms", "at most 3600 seconds"),
    "a timeout beyond numbers": ({"timeout_s": HUGE}, "timeout_ms", "at most 3600 seconds"),
    "a timeout too long": ({"timeout_s": 3601}, "timeout_ms", "at most 3600 seconds"),
    "a callback that is none": ({"callback": 5}, "callback", "function"),
}
BAD_PARAMS = {
    "no parameters": (0, "sampling_params", "must be SamplingParams"),
    "a mapping": ({"temperature": 0}, "sampling_params", "must be SamplingParams"),
    "too many stop strings": (SamplingParams(stop=["x"] * 65), "sampling_params.stop", "at most 64"),
    "a long stop string": (SamplingParams(stop="x" * 1025), "sampling_params.stop", "at most 1024"),
    "a long bad word": (SamplingParams(bad_words="x" * 257), "sampling_params.bad_words", "at most 256"),
    "a stop token out of range": (SamplingParams(stop_token_ids=[HUGE]), "sampling_params.stop_token_ids", "258"),
    "too many completions": (SamplingParams(n=65), "sampling_params.n", "limits.max_sequences"),
    "far too many completions": (SamplingParams(n=2**31 - 1), "sampling_params.n", "limits.max_sequences"),
    "a long schema": (
        SamplingParams(structured_outputs={"regex": "x" * 70_000}),
        "sampling_params.structured_outputs.regex",
        "limits.max_grammar_length",
    ),
}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), dtype="float32", num_threads=1, num_blocks=64, max_num_waiting=4) as llm:
        yield llm


@pytest.fixture
def engine(llm: LLM) -> Iterator[InferenceEngine]:
    """Fails the test if what it was given has harmed the engine."""
    yield llm.engine
    assert len(llm.engine.submit_request("hello", SHORT).result(30).outputs[0].token_ids) == 2


def check(refused: InvalidRequestError, field: str, limit: str) -> None:
    assert refused.field == field
    assert limit in str(refused)
    assert len(str(refused)) < 500


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_name(engine, name):
    prompt, field, limit = BAD_PROMPTS[name]
    with pytest.raises(InvalidRequestError) as refused:
        engine.submit_request(prompt, SHORT)
    check(refused.value, field, limit)


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_option_is_refused_by_name(engine, name):
    options, field, limit = BAD_OPTIONS[name]
    with pytest.raises(InvalidRequestError) as refused:
        engine.submit_request("hello", SHORT, **options)
    check(refused.value, field, limit)


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_parameters_are_refused_by_name(engine, name):
    params, field, limit = BAD_PARAMS[name]
    with pytest.raises(InvalidRequestError) as refused:
        engine.submit_request("hello", params)
    check(refused.value, field, limit)


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (None, SHORT, "prompts"),
        (b"abc", SHORT, "prompts"),
        (5, SHORT, "prompts"),
        ({"a", "b"}, SHORT, "prompts"),
        ([True], SHORT, "prompt"),
        (["hello", None], SHORT, "prompt"),
        ([[5], [[5]]], SHORT, "token_ids"),
        ([[]], SHORT, "token_ids"),
        ([5, "hello"], SHORT, "prompt_token_ids"),
        ({}, SHORT, "prompt"),
        ({"text": "hello"}, SHORT, "prompt"),
        ({"prompt": "hello", "multi_modal_data": {}}, SHORT, "prompt"),
        ({"prompt": [5]}, SHORT, "prompt"),
        ({"prompt_token_ids": "hello"}, SHORT, "prompt_token_ids"),
        ("hello", 5, "sampling_params"),
        ("hello", {"max_tokens": 2}, "sampling_params"),
        (["hello"], [None], "sampling_params"),
        (["hello", "hello"], [SHORT], "sampling_params"),
    ],
)
def test_bad_batches_are_refused_by_name(llm, engine, prompts, params, field):
    with pytest.raises(InvalidRequestError) as refused:
        llm.generate(prompts, params)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "messages", [None, 5, "hello", b"hello", [], [[]], [5], {"role": "user"}, [{"role": "user", "content": 5}], [None]]
)
def test_bad_messages_are_refused_by_name(llm, engine, messages):
    with pytest.raises(InvalidRequestError) as refused:
        llm.chat(messages, SHORT)
    assert refused.value.field.startswith("chat.messages")


@pytest.mark.parametrize(
    "params",
    [
        None,
        SHORT,
        BeamSearchParams(beam_width=11, max_tokens=2),
        BeamSearchParams(beam_width="2", max_tokens=2),
        BeamSearchParams(beam_width=None, max_tokens=2),
        BeamSearchParams(beam_width=2, max_tokens=0),
        BeamSearchParams(beam_width=2, max_tokens=2, temperature="0"),
        BeamSearchParams(beam_width=2, max_tokens=2, include_stop_str_in_output="no"),
    ],
)
def test_a_bad_search_is_refused(llm, engine, params):
    with pytest.raises(InvalidRequestError):
        llm.beam_search("hello", params)


def test_an_empty_text_is_a_prompt_where_the_tokenizer_begins_every_text(tiny_model, tmp_path):
    """As for Hugging Face's tokenizers and vLLM. No token ids are no prompt for anyone."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = tokenizer.token_to_id("<pad>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", begin)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM(str(folder), dtype="float32", num_threads=1, num_blocks=64) as llm:
        (output,) = llm.generate("", SHORT)
        assert (output.prompt, output.prompt_token_ids) == ("", [begin])
        with pytest.raises(InvalidRequestError, match=r"token_ids = .*must not be empty"):
            llm.generate([[]], SHORT)


def test_numbers_of_numpy_are_token_ids(llm):
    ids = llm.get_tokenizer().encode("hello")
    (output,) = llm.generate([[numpy.int64(token_id) for token_id in ids]], SHORT)
    assert output.outputs == llm.generate("hello", SHORT)[0].outputs
    assert {type(token_id) for token_id in output.prompt_token_ids} == {int}


def test_numbers_that_mean_all_are_brought_down_to_what_there_is(llm):
    params = SamplingParams(temperature=0.5, seed=1, top_k=2**63, max_tokens=2**63, truncate_prompt_tokens=2**63)
    assert llm.generate("x" * 250, params)[0].outputs[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("options", [one for one in BAD_OPTIONS.values() if "callback" not in one[0]])
def test_clients_refuse_the_same_options_before_they_send_anything(options):
    fields, field, _ = options
    if field == "timeout_ms" or "at most" in options[2]:
        return  # a limit, which the server knows
    with pytest.raises(InvalidRequestError) as refused:
        submission("hello", SHORT, None, model="", request_id="", **fields)
    assert refused.value.field == field


# --- whatever comes ---

ODD_NUMBERS = st.sampled_from(
    [
        *(None, True, -1, 0, 1, 2, 3, 257, 258, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, HUGE, -HUGE),
        *(0.0, 0.5, 1.5, -1.0, 1e-300, 1e300, math.nan, math.inf, -math.inf, Fraction(1, 3), 1j),
        *(numpy.int64(2), numpy.uint64(2**64 - 1), numpy.float32(0.5), numpy.bool_(True), numpy.array([1, 2])),
    ]
)
ODD_TEXTS = st.sampled_from(["", "hello", HALF, "\0", "x" * 300, "日本👍", b"hello", bytearray(b"x")])
ODD_LISTS = st.lists(ODD_NUMBERS | ODD_TEXTS, max_size=3) | st.lists(st.integers(0, 300), max_size=5)
ODD_MAPPINGS = st.dictionaries(
    st.sampled_from(["prompt", "prompt_token_ids", "role", "content", "json", "regex", "choice", 5, None]),
    ODD_NUMBERS | ODD_TEXTS | ODD_LISTS,
    max_size=3,
)
ODD = ODD_NUMBERS | ODD_TEXTS | ODD_LISTS | ODD_MAPPINGS | st.just(Priority.HIGH) | st.just({1, 2}) | st.just(object())
PROMPTS = st.just("hello") | ODD
SERVICE = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("priority", "tenant", "timeout_s", "cache_salt", "cache_ttl_s", "callback"), ODD)
)
FIELDS = st.dictionaries(st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), ODD, max_size=3)
SHAPES = st.dictionaries(st.sampled_from(sorted(StructuredOutputs.__dataclass_fields__)), ODD, max_size=2)
FUZZ = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def params_of(fields: dict, shape: dict | None) -> SamplingParams:
    structured = {} if shape is None else {"structured_outputs": shape}
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 2} | structured | fields))


def survives(llm: LLM, call: Callable[[], object]) -> None:
    """The call answers, or refuses by one of our errors; the engine answers afterwards."""
    with suppress(CallerError, CapacityError, DeadlineExceededError):
        call()
    assert len(llm.generate("hello", SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 2


@FUZZ
@given(prompt=PROMPTS, fields=FIELDS, service=SERVICE)
def test_whatever_is_submitted_the_engine_goes_on(llm, prompt, fields, service):
    survives(llm, lambda: llm.engine.submit_request(prompt, params_of(fields, None), **service).result(60))


@FUZZ
@given(shape=SHAPES)
def test_whatever_shape_is_wished_for_the_engine_goes_on(llm, shape):
    survives(llm, lambda: llm.engine.submit_request("hello", params_of({}, shape)).result(60))


@FUZZ
@given(prompts=PROMPTS | st.lists(PROMPTS, max_size=3), params=ODD | st.lists(st.just(SHORT) | ODD, max_size=3))
def test_whatever_batch_is_given_the_engine_goes_on(llm, prompts, params):
    survives(llm, lambda: llm.generate(prompts, params))
    survives(llm, lambda: llm.generate(prompts, SHORT))


@FUZZ
@given(messages=ODD | st.lists(ODD_MAPPINGS | ODD, max_size=2))
def test_whatever_is_said_the_engine_goes_on(llm, messages):
    survives(llm, lambda: llm.chat(messages, SHORT))


@FUZZ
@given(
    prompts=PROMPTS,
    fields=st.dictionaries(st.sampled_from(sorted(BeamSearchParams.__dataclass_fields__)), ODD, max_size=2),
)
def test_whatever_is_searched_for_the_engine_goes_on(llm, prompts, fields):
    survives(llm, lambda: llm.beam_search(prompts, BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | fields))))


@pytest.fixture(scope="module")
def with_added_tokens(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has two tokens more than its embedding, one of which is said to end outputs."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("added") / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|one|>", "<|two|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 259]}')
    return folder


@pytest.mark.parametrize("executor", ["native", "hf"])
def test_text_with_a_token_that_the_model_has_no_embedding_for_is_refused(with_added_tokens, executor):
    with LLM(str(with_added_tokens), executor=executor, num_threads=1, num_blocks=64) as llm:
        for prompt in ("hello<|two|>", "<|one|>"):
            with pytest.raises(InvalidRequestError, match=r"this token, of id 25[89].*vocabulary ends at 257"):
                llm.generate(prompt, SHORT, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="259"):
            llm.chat(
                [{"role": "user", "content": "hello<|two|>"}],
                SHORT,
                chat_template="{{ messages[0].content }}",
                use_tqdm=False,
            )
        plain = llm.generate("hello", SHORT, use_tqdm=False)[0].outputs[0].token_ids
        assert len(plain) == 2
        banned = SamplingParams(temperature=0.0, max_tokens=2, min_tokens=2, bad_words=["<|two|>"], stop=["<|one|>"])
        assert len(llm.generate("hello", banned, use_tqdm=False)[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    "name", [name for name, one in PARAMETERS.items() if one.kind in (WHOLE_NUMBER, TOKEN_IDS, BIASES)]
)
def test_a_whole_number_of_any_size_works_or_is_refused_by_name(engine, name: str):
    for value in WHOLE:
        given = {TOKEN_IDS: [value], BIASES: {value: 1.0}}.get(PARAMETERS[name].kind, value)
        asked = {"max_tokens": 2, "stop": ["a", "e"], "seed": 1, "logprobs": 1 if name == "logprob_token_ids" else None}
        problem = ""
        try:
            engine.submit_request("hi", SamplingParams(**{**asked, name: given})).result(60)
        except InvalidRequestError as error:
            problem = str(error)
        assert not problem or name in problem, (value, problem)
