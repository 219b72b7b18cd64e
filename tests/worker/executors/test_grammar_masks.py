"""Outputs with a grammar match it, whatever a model says, and however they were interrupted.

The model here is noise: the logits after a prefix are random numbers made from its tokens, far likelier to break any
grammar than a trained model. Everything else is real: scheduler, masks, sampler and the bundled tokenizer.
"""

import json
import random
import re
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.draws import DrawParams, LogitsSettings
from holdfast.worker.engine.grammar_masks import GrammarMasks
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.grammar_matchers import NONE_FITS, GrammarMatchers
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import DEAD_END, NO_ROWS, ScheduledSequence, StepPlan, StepResult, draws_of
from tests.reference.sampler import draw
from tests.worker.schedulers import dropped
from tests.worker.schemas import schema

FOLDER = Path(__file__).parents[3] / "cluster/bundled_model/model"
EOS = frozenset({0, 2})
TOKENIZER = Tokenizer.load(str(FOLDER))
COMPILER = GrammarCompiler(TOKENIZER)
VOCAB = TOKENIZER.vocab_size + 24  # padded, as many models are
ABC = {"regex": "(abc|xyz){2,20}"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny steps: threads, which another test may have asked for, would only get in each other's way."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class NoiseRunner:
    """A `StepRunner` whose logits are random numbers, a function of the tokens that a sequence has output."""

    def __init__(self) -> None:
        self.masks = GrammarMasks(str(FOLDER), EOS)
        self.prompts: dict[int, int] = {}
        self._table = torch.randn(257, VOCAB, generator=torch.Generator().manual_seed(3)) * 4

    def run(self, plan: StepPlan) -> StepResult:
        draws = draws_of(plan)
        keys = [zlib.crc32(repr((params.seed, params.output_token_ids)).encode()) for params in draws]
        rows = [self._table[key % 257].roll(key % 911) for key in keys]
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB)
        drawn = iter(draw(logits, draws, self.masks.masks(plan)))
        counts = [sequence.num_draws if sequence.draw else 0 for sequence in plan.sequences]
        return StepResult(step_id=plan.step_id, token_ids=tuple(tuple(next(drawn) for _ in range(n)) for n in counts))


def request(name: str, wish: dict, outputs: tuple[int, ...] = (), prompt=(5, 6, 7), **settings) -> EngineRequest:
    seed = zlib.crc32(name.encode())
    params = SamplingParams(**{"seed": seed, "max_tokens": 400, "structured_outputs": wish, **settings})
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        output_token_ids=outputs,
        grammar=COMPILER.compile(params.structure),
    )


def completed(requests: list[EngineRequest], num_blocks: int = 4096, max_num_seqs: int = 32):
    """Tokens and finish reason of each, and how often one was preempted."""
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_waiting=1000)
    scheduler = Scheduler(config, num_blocks=num_blocks, block_size=4, max_model_len=1000, eos_token_ids=EOS)
    tokens = {item.request_id: list(item.output_token_ids) for item in requests}
    reasons: dict[str, FinishReason] = {}
    runner = NoiseRunner()
    for item in requests:
        scheduler.add(item)
    while (plan := scheduler.plan()) is not None:
        for delta in scheduler.commit(plan, runner.run(plan)):
            tokens[delta.attempt] += delta.token_ids
            if delta.finish_reason is not None:
                reasons[delta.attempt] = delta.finish_reason
    runner.masks.close()
    return tokens, reasons, scheduler.stats().num_preemptions


def text_of(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids)


def only(wish: dict, **settings) -> tuple[str, FinishReason, list[int]]:
    tokens, reasons, _ = completed([request("r", wish, **settings)])
    return text_of(tokens["r"]), reasons["r"], tokens["r"]


# --- the shapes ---


@pytest.mark.parametrize("num_schemas", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_schemas_of_varied_shape_are_followed_by_noise(num_schemas):
    rng = random.Random(11)
    schemas = {str(number): schema(rng) for number in range(num_schemas)}
    tokens, reasons, _ = completed([request(name, {"json": wish}) for name, wish in schemas.items()])
    ended = [name for name in schemas if reasons[name] is FinishReason.STOP]
    for name in ended:
        jsonschema.Draft202012Validator(schemas[name]).validate(json.loads(text_of(tokens[name])))
    assert len(ended) >= 0.96 * num_schemas, f"only {len(ended)} came to an end"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_a_regex_is_matched_by_the_whole_output(temperature: float):
    for seed in range(5):
        text, reason, _ = only({"regex": "[ab]{3}(-[0-9]{2}){1,3}"}, temperature=temperature, seed=seed)
        assert reason is FinishReason.STOP
        assert re.fullmatch("[ab]{3}(-[0-9]{2}){1,3}", text), text


def test_a_choice_is_one_of_its_texts():
    texts = ["yes", "no", 'a "quoted" one', "line\nbreak", "back\\slash / ünï"]
    seen = {only({"choice": texts}, seed=seed, temperature=10.0)[0] for seed in range(30)}
    assert seen <= set(texts)
    assert len(seen) > 2


def test_a_lark_grammar_is_followed():
    text, reason, _ = only({"grammar": 'start: "(" start ")" | /[0-9]/'}, seed=2)
    assert reason is FinishReason.STOP
    assert re.fullmatch(r"\(*[0-9]\)*", text)
    assert text.count("(") == text.count(")")


def test_a_json_object_is_one():
    for seed in range(20):
        text, reason, _ = only({"json_object": True}, seed=seed, max_tokens=60)
        assert text.startswith(('{"', "{}")), "JSON has no blanks between its parts"
        if reason is FinishReason.STOP:
            assert isinstance(json.loads(text), dict)


# --- the end ---


def test_an_output_ends_where_its_grammar_does_also_if_it_is_to_ignore_ends():
    for settings in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        text, reason, tokens = only({"choice": ["hens"]}, **settings)
        assert (text, reason, tokens[-1] in EOS) == ("hens", FinishReason.STOP, True), settings


def test_ignoring_ends_goes_on_while_the_grammar_can():
    wish = {"regex": "a{1,40}"}
    assert {len(only(wish, seed=seed)[0]) for seed in range(8)} != {40}
    assert {len(only(wish, seed=seed, ignore_eos=True)[0]) for seed in range(8)} == {40}


def test_a_grammar_outranks_allowed_tokens_and_feels_the_other_logits_processors():
    (comma,) = TOKENIZER.encode(",", add_special_tokens=False)
    assert only({"choice": ["yes", "no"]}, allowed_token_ids=[comma])[0] in ("yes", "no")
    letters = {text: TOKENIZER.encode(text, add_special_tokens=False)[0] for text in "ab"}
    biased = only({"regex": "[ab]{12}"}, logit_bias={letters["a"]: 100.0}, temperature=0.0)[0]
    assert biased == "a" * 12


def test_a_model_that_cannot_end_refuses_a_grammar():
    config = SchedulerConfig()
    scheduler = Scheduler(config, num_blocks=9, block_size=4, max_model_len=30, eos_token_ids=frozenset())
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        scheduler.add(request("r", ABC, max_tokens=5))


# --- the one idea: a function of the request and its output so far ---


def many() -> list[EngineRequest]:
    rng = random.Random(4)
    shapes = [{"json": schema(rng)} for _ in range(6)] + [ABC, ABC]
    constrained = [request(f"r{number}", wish, max_tokens=90) for number, wish in enumerate(shapes)]
    free = [replace(request(f"f{number}", ABC, max_tokens=40), grammar="") for number in range(2)]
    return [*constrained[:3], free[0], *constrained[3:], free[1]]


def test_alone_as_in_a_batch_and_preempted_as_not():
    requests = many()
    alone = {item.request_id: completed([item])[0][item.request_id] for item in requests}
    together, _, num_preemptions = completed(requests)
    assert (together, num_preemptions) == (alone, 0)
    crowded, _, num_preemptions = completed(requests, num_blocks=26)
    assert num_preemptions > 0
    assert crowded == alone


def test_a_continued_request_goes_on_as_if_nothing_had_happened():
    whole = completed([request("r", ABC)])[0]["r"]
    for cut in range(1, len(whole)):
        assert completed([request("r", ABC, outputs=tuple(whole[:cut]))])[0]["r"] == whole, cut


# --- drafts ---


def _plan(item: EngineRequest, outputs: list[int], num_draws: int, token_ids: list[int]) -> StepPlan:
    """A step of one sequence with these outputs; the last `num_draws - 1` of `token_ids` are drafts."""
    params = DrawParams(item.sampling_params, len(outputs), LogitsSettings.of(item, EOS), tuple(outputs))
    sequence = ScheduledSequence(
        sequence_id=1, first_position=0, token_ids=tuple(token_ids), block_ids=(0,), draw=params, num_draws=num_draws
    )
    return StepPlan(step_id=1, others=(sequence,))


def test_a_draw_after_drafts_is_masked_as_if_they_were_output_and_they_are_taken_back():
    item = request("r", ABC)
    whole = completed([item])[0]["r"]
    masks = GrammarMasks(str(FOLDER), EOS)
    fresh = [GrammarMasks(str(FOLDER), EOS).masks(_plan(item, whole[:n], 1, [7]))[0] for n in range(len(whole))]
    for start in range(len(whole) - 3):
        rows = masks.masks(_plan(item, whole[:start], 3, [7, *whole[start : start + 2]]))
        assert [rows[row] for row in range(3)] == fresh[start : start + 3], start


def test_rows_after_a_draft_that_breaks_the_grammar_or_ends_it_have_no_mask():
    item = request("r", {"regex": "[ab]{1,9}"})
    a, digit = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("a", "7"))
    masks = GrammarMasks(str(FOLDER), EOS)
    assert set(masks.masks(_plan(item, [a], 4, [a, a, digit, a]))) == {0, 1}
    assert set(masks.masks(_plan(item, [a], 4, [a, a, 0, a]))) == {0, 1}
    assert set(masks.masks(_plan(item, [a, a], 1, [a]))) == {0}


# --- what is kept ---


def test_a_reader_that_read_another_output_starts_over():
    item = request("r", ABC)
    whole = completed([item])[0]["r"]
    masks = GrammarMasks(str(FOLDER), EOS)
    for cut in (3, 1, 2, 0):
        fresh = GrammarMasks(str(FOLDER), EOS).masks(_plan(item, whole[:cut], 1, [7]))
        assert masks.masks(_plan(item, whole[:cut], 1, [7])) == fresh, cut


def test_readers_of_sequences_that_are_gone_are_dropped():
    masks = GrammarMasks(str(FOLDER), EOS)
    plan = _plan(request("r", ABC), [], 1, [7])
    for number in range(100):
        sequence = replace(plan.sequences[0], sequence_id=number)
        masks.masks(replace(plan, step_id=number, decodes=NO_ROWS, others=(sequence,)))
    assert len(masks._matchers) < 40


def test_a_plan_without_a_grammar_costs_nothing(tmp_path: Path):
    masks = GrammarMasks(str(tmp_path), EOS)  # there is no tokenizer to be read
    plan = _plan(replace(request("r", ABC), grammar=""), [], 1, [7])
    assert masks.start(plan) is None


class StuckMatcher:
    """A matcher whose masks do not come until it is released; the grammar `quick` has one at once."""

    def __init__(self, grammar: str, release: threading.Event) -> None:
        self._is_quick, self._release = grammar == "quick", release

    def compute_bitmask(self) -> bytes:
        assert self._is_quick or self._release.wait(60)
        return b"\x03"

    def consume_tokens(self, tokens: list[int]) -> bool:
        return True

    def is_error(self) -> bool:
        return False


def test_a_mask_that_takes_too_long_fails_its_sequence_and_not_the_replica():
    release, looks = threading.Event(), []
    masks = GrammarMasks("", EOS, lambda: GrammarMatchers(lambda grammar: StuckMatcher(grammar, release), EOS))
    quick, stuck = (
        _plan(replace(request(grammar, ABC), grammar=grammar), [], 1, [7]).sequences[0]
        for grammar in ("quick", "stuck")
    )
    plan = StepPlan(step_id=1, others=(quick, replace(stuck, sequence_id=2)))
    waiting = masks.start(plan)
    assert waiting is not None
    assert masks.collect(waiting, lambda: looks.append(1), limit_s=0.4) == {0: b"\x03", 1: NONE_FITS}
    assert looks, "waiting counts as progress"
    again = masks.start(StepPlan(step_id=2, others=(quick,)))
    assert again is not None
    assert masks.collect(again, lambda: None, limit_s=60) == {0: b"\x03"}, "the others go on while the thread is stuck"
    release.set()


def test_a_dead_end_fails_its_request_alone():
    """The scheduler drops the sequence that no token fits; the one beside it goes on."""
    scheduler = Scheduler(SchedulerConfig(), num_blocks=64, block_size=4, max_model_len=1000, eos_token_ids=EOS)
    for name in ("dead", "alive"):
        scheduler.add(request(name, ABC, max_tokens=9))
    plan = scheduler.plan()
    assert plan is not None
    deltas = scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=((DEAD_END,), (9,))))
    assert dropped(scheduler) == ["dead"]
    assert [delta.token_ids for delta in deltas] == [(9,)]
