"""Raw log-probabilities: what they are, that neighbours do not touch them, and that they are cut as the tokens are."""

import math
from dataclasses import replace

import pytest
import torch

from holdfast.worker.draws import DrawParams
from holdfast.worker.executors import step_sampler
from holdfast.worker.executors.step_sampler import ChosenLogprobs
from holdfast.worker.request import EngineRequest, TokenLogprob
from holdfast.worker.step_plan import NO_ROWS, StepResult
from tests.draw_params import changed, draw_params
from tests.reference import logprobs as reference
from tests.reference.logprobs import token_logprobs
from tests.worker.scheduler.test_logits_settings import VOCAB, LogitsRunner
from tests.worker.schedulers import BLOCK_SIZE, EOS, make_request, make_scheduler

PLAIN = draw_params(seed=7, first_output_index=0, temperature=1.0, top_k=0, top_p=1.0)


def asking(count: int | None) -> DrawParams:
    return changed(PLAIN, num_logprobs=count)


def made(num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3


def by_definition(row: list[float], token_id: int, count: int) -> TokenLogprob:
    """In Python's floats, one term at a time, the sum exact."""
    largest = max(row)
    total = math.log(math.fsum(math.exp(value - largest) for value in row))
    rounded = torch.tensor([value - largest - total for value in row], dtype=torch.float64).float().tolist()
    order = sorted(range(len(row)), key=lambda other: (-row[other], other))
    top = tuple((other, rounded[other]) for other in order[:count])
    return TokenLogprob(token_id=token_id, logprob=rounded[token_id], rank=order.index(token_id) + 1, top=top)


@pytest.mark.parametrize("vocab_size", [7, 1000])
def test_they_are_the_log_softmax_of_the_row(vocab_size, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK_VALUES", 2 * vocab_size)
    logits, token_ids, counts = made(5, vocab_size), [0, 6, 3, 1, 2], [20, 0, 1, 5, 3]
    said = token_logprobs(logits, list(map(asking, counts)), token_ids)
    for row, token_id, count, item in zip(logits.tolist(), token_ids, counts, said, strict=True):
        expected = by_definition(row, token_id, count)
        assert (item.token_id, item.rank, len(item.top)) == (token_id, expected.rank, min(count, vocab_size))
        assert [best for best, _ in item.top] == [best for best, _ in expected.top]
        assert [item.logprob, *(value for _, value in item.top)] == pytest.approx(
            [expected.logprob, *(value for _, value in expected.top)], rel=2e-7, abs=1e-9
        )


def test_equal_logits_rank_by_token_id_and_zeros_have_no_sign():
    logits = torch.tensor([[-0.0, 2.0, 0.0, 2.0, -1.0, -2.0]])
    ranks = [token_logprobs(logits, [asking(6)], [token_id])[0].rank for token_id in range(6)]
    assert ranks == [3, 1, 4, 2, 5, 6]
    assert [best for best, _ in token_logprobs(logits, [asking(6)], [0])[0].top] == [1, 3, 0, 2, 4, 5]


def test_a_token_that_cannot_be_is_minus_infinity():
    (item,) = token_logprobs(torch.tensor([[0.0, -math.inf, 0.0]]), [asking(3)], [1])
    assert (item.logprob, item.rank) == (-math.inf, 3)
    assert item.top[0] == (0, pytest.approx(math.log(0.5)))


def test_rows_that_do_not_ask_say_nothing_and_cost_nothing(monkeypatch):
    logits = made(3, 50)
    said = token_logprobs(logits, [asking(None), asking(2), asking(None)], [4, 5, 6])
    assert [item is not None for item in said] == [False, True, False]
    assert said[1] == token_logprobs(logits[1:2], [asking(2)], [5])[0]
    monkeypatch.setattr(reference, "_read_off", None)
    assert token_logprobs(logits, [asking(None)] * 3, [4, 5, 6]) == []


@pytest.mark.parametrize("vocab_size", [7, 1001, 40_000])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(vocab_size):
    logits = made(33, vocab_size)
    together = token_logprobs(logits, [asking(row % 21) for row in range(33)], [row % 7 for row in range(33)])
    for row, item in enumerate(together):
        assert token_logprobs(logits[row : row + 1].clone(), [asking(row % 21)], [row % 7]) == [item]


# --- through the scheduler ---


def test_tokens_that_draws_name_are_told_in_place_of_the_best(monkeypatch):
    monkeypatch.setattr(step_sampler, "_CHUNK_VALUES", 100)  # two rows at a time
    logits = torch.randn(6, 33, generator=torch.Generator().manual_seed(1))
    named = [(3, 1), (), (32, 3, 0), (5,), (2, 2), (0,)]
    draws = [changed(PLAIN, num_logprobs=0 if ids else 2, logprob_token_ids=ids) for ids in named]
    said = token_logprobs(logits, draws, [1] * 6)
    message = ChosenLogprobs.of(logits, draws).put_into(said)
    wanted = torch.log_softmax(logits.double(), -1).float()
    for row, (item, ids) in enumerate(zip(message, named, strict=True)):
        if ids:
            assert item.top == tuple((token_id, float(wanted[row, token_id])) for token_id in ids)
            assert (item.logprob, item.rank) == (said[row].logprob, said[row].rank)
        else:
            assert item == said[row]
    assert ChosenLogprobs.of(logits, draws[1:2]) is None


WISHES = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "banned": {"temperature": 0.0, "logprobs": 1, "logit_bias": dict.fromkeys(range(1, 16), -100.0)},
    "warm": {"temperature": 1.7, "top_k": 5, "logprobs": 0},
    "silent": {"temperature": 1.0},
    "long": {"prompt_len": 50, "logprobs": 20},
}


def wish(name: str, outputs=()) -> EngineRequest:
    return make_request(name, outputs=tuple(outputs), **{"max_tokens": 30, "ignore_eos": True, **WISHES[name]})


def completed(*requests: EngineRequest, num_blocks=64) -> tuple[dict[str, list[TokenLogprob]], int]:
    """Logprobs of requests that run together, and how often one was preempted."""
    scheduler, runner = make_scheduler(num_blocks=num_blocks), LogitsRunner(num_blocks, BLOCK_SIZE, VOCAB)
    said = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.plan()
        for delta in scheduler.commit(plan, runner.run(plan)):
            asks = "logprobs" in WISHES[delta.attempt]
            assert tuple(item.token_id for item in delta.logprobs) == (delta.token_ids if asks else ())
            said[delta.attempt] += delta.logprobs
    return said, scheduler.stats().num_preemptions


def test_strangers_chunks_and_preemptions_change_no_bit():
    together, num_preemptions = completed(*map(wish, WISHES), num_blocks=24)
    assert num_preemptions > 0
    for name, said in together.items():
        assert said == completed(wish(name))[0][name]
        assert len(said) == (0 if name == "silent" else 30)


def test_a_continued_request_says_what_it_had_left_to_say():
    for name in WISHES.keys() - {"silent"}:
        whole = completed(wish(name))[0][name]
        token_ids = [item.token_id for item in whole]
        for num_before in (1, 7, 29):
            assert completed(wish(name, token_ids[:num_before]))[0][name] == whole[num_before:]


def test_they_are_raw_whatever_the_draw_was_made_to_do():
    greedy, banned = completed(wish("greedy"))[0]["greedy"], completed(wish("banned"))[0]["banned"]
    assert {item.rank for item in greedy} == {1}
    assert all(item.top[0] == (item.token_id, item.logprob) for item in greedy)
    assert max(item.rank for item in banned) > 1
    assert banned[0].top[0] == greedy[0].top[0]


def test_what_a_commit_drops_of_the_tokens_it_drops_of_their_logprobs():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_len=5, logprobs=0))
    plan = scheduler.plan()
    drafted = replace(plan.sequences[0], token_ids=(100, 101, 102, 103, 104, 7, EOS, 8), num_draws=4)
    drawn = (7, EOS, 8, 9)
    said = tuple(TokenLogprob(token_id=token_id, logprob=-1.0, rank=1) for token_id in drawn)
    result = StepResult(step_id=plan.step_id, token_ids=(drawn,), logprobs=(said,))
    (delta,) = scheduler.commit(replace(plan, decodes=NO_ROWS, others=(drafted,)), result)
    assert (delta.token_ids, delta.logprobs) == ((7, EOS), said[:2])
