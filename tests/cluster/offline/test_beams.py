"""Beam search on the engine, against Hugging Face's `generate(num_beams=...)`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.offline.outputs import BeamSearchParams
from holdfast.cluster.offline.request_handle import beam_sequence
from holdfast.worker.errors import DeadlineExceededError, InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams

NUM_NEW = 10
PROMPTS = ["hello", "a longer prompt of several words", "x"]
Beams = Callable[[list[int], int, float, int], list[list[int]]]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), dtype="float32", num_threads=1, num_blocks=16, block_size=16, max_num_waiting=12) as llm:
        yield llm


@pytest.fixture(scope="module")
def by_hugging_face(tiny_model: Path) -> Beams:
    """`beams(prompt, width, penalty, end)`: all beams that Hugging Face finds, best first, without their padding."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def beams(prompt: list[int], width: int, penalty: float, end: int) -> list[list[int]]:
        rows = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=257,
        )
        return [[token_id for token_id in row[len(prompt) :].tolist() if token_id != 257] for row in rows]

    return beams


def found(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """The tokens of each beam, best first."""
    (output,) = llm.generate(prompt, params)
    return [one.token_ids for one in output.outputs]


def ending_in(token_id: int, width: int, penalty: float) -> SamplingParams:
    return SamplingParams(
        n=width,
        beam_width=width,
        length_penalty=penalty,
        max_tokens=NUM_NEW,
        ignore_eos=True,
        stop_token_ids=[token_id],
    )


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (2, 1.0), (4, 1.0), (4, 0.0), (4, 2.0), (3, -1.0), (10, 0.5)])
def test_beams_are_those_of_hugging_face(llm: LLM, by_hugging_face: Beams, width: int, penalty: float):
    """The end is a token that comes up in the beams, so that some of them end early."""
    prompts = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    num_ended = 0
    for prompt in prompts:
        end = by_hugging_face(prompt, width, penalty, 256)[-1][3]
        (output,) = llm.generate(prompt, ending_in(end, width, penalty))
        assert [one.token_ids for one in output.outputs] == by_hugging_face(prompt, width, penalty, end)
        num_ended += sum(one.finish_reason == "stop" for one in output.outputs)
    assert num_ended > 0


def test_many_prompts_are_searched_side_by_side(llm: LLM):
    """More of them than the queue takes."""
    prompts = [llm.get_tokenizer().encode(f"prompt {number}") for number in range(7)]
    params = ending_in(5, 3, 1.0)
    together = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [[one.token_ids for one in output.outputs] for output in together] == [
        found(llm, prompt, params) for prompt in prompts
    ]


def test_the_prefix_cache_leaves_little_to_compute(llm: LLM):
    prompt = list(range(3, 83))
    before = llm.engine.get_stats().num_tokens_computed
    found(llm, prompt, ending_in(257, 4, 1.0))
    num_computed = llm.engine.get_stats().num_tokens_computed - before
    num_requests = 1 + 4 * (NUM_NEW - 1)
    assert num_computed < 80 + num_requests * 6, "each request computes what no full block of 4 holds"


def test_outputs_have_the_shape_that_scripts_expect(llm: LLM, by_hugging_face: Beams):
    encode, decode = llm.get_tokenizer().encode, llm.get_tokenizer().decode
    outputs = llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=NUM_NEW))
    assert len(outputs) == 2
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        expected = by_hugging_face(encode(prompt), 3, 1.0, 256)
        assert [sequence.tokens for sequence in output.sequences] == [encode(prompt) + tokens for tokens in expected]
        for sequence in output.sequences:
            drawn = sequence.tokens[len(encode(prompt)) :]
            said = [item[token_id].logprob for token_id, item in zip(drawn, sequence.logprobs, strict=True)]
            assert sequence.cum_logprob == pytest.approx(sum(said))
            assert sequence.text == decode(sequence.tokens)
            assert sequence.finish_reason == "length"
    (same,) = llm.beam_search({"prompt_token_ids": encode(PROMPTS[0])}, BeamSearchParams(beam_width=3, max_tokens=10))
    assert same == outputs[0]


def test_an_end_is_left_out_unless_it_is_asked_for(llm: LLM):
    prompt = llm.get_tokenizer().encode("hello")
    end = found(llm, prompt, SamplingParams(n=2, beam_width=2, max_tokens=NUM_NEW))[0][2]
    handle = llm.engine.submit_request(prompt, ending_in(end, 1, 1.0))
    output = handle.result(60).outputs[0]
    assert output.token_ids[-1] == end
    without, kept = (
        beam_sequence(*handle.beams[0], prompt, llm.get_tokenizer(), keep_end=keep_end) for keep_end in (False, True)
    )
    assert kept.tokens == [*without.tokens, end]
    assert (len(without.logprobs), len(kept.logprobs)) == (len(output.token_ids) - 1, len(output.token_ids))
    assert without.cum_logprob == kept.cum_logprob


def test_beams_are_also_the_completions_of_a_request(llm: LLM):
    """Their texts are those of their tokens, after the prompt where it is to be echoed."""
    params = SamplingParams(n=2, beam_width=3, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate("hello", params)
    searched = llm.beam_search("hello", BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))[0].sequences
    assert [output.prompt_token_ids + one.token_ids for one in output.outputs] == [one.tokens for one in searched[:2]]
    assert [one.cumulative_logprob for one in output.outputs] == [one.cum_logprob for one in searched[:2]]
    assert [one.text for one in output.outputs] == [llm.get_tokenizer().decode(one.token_ids) for one in output.outputs]
    (echoed,) = llm.generate("hello", replace(params, echo=True))
    assert [one.text for one in echoed.outputs] == ["hello" + one.text for one in output.outputs]


def test_the_time_of_a_search_is_that_of_all_its_tokens(llm: LLM):
    with pytest.raises(DeadlineExceededError):
        llm.beam_search("hello", BeamSearchParams(beam_width=4, max_tokens=200, ignore_eos=True), timeout_s=0.02)
    assert llm.engine.get_stats().num_running == 0


def test_bad_values_are_refused_by_name_and_the_engine_goes_on(llm: LLM):
    for wrong, field in (
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 11}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
    ):
        with pytest.raises(InvalidRequestError, match=field):
            llm.beam_search("hello", BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong}))
    with pytest.raises(InvalidRequestError):
        llm.beam_search(["hello", "x" * 2000], BeamSearchParams(beam_width=2, max_tokens=4))
    assert llm.engine.get_stats().num_running == 0
