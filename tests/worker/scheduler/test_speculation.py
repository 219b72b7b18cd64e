"""Which sequences get drafts and how many, what becomes of them, and that nothing of them stays."""

import pytest

from holdfast.worker.config import SchedulerConfig, SpeculationConfig
from holdfast.worker.scheduler.speculation import max_num_draws
from holdfast.worker.step_plan import Drafting, StepResult
from tests.pseudo_model import PseudoRunner, pseudo_completion
from tests.worker.schedulers import BLOCK_SIZE, EOS, make_request, make_result, make_scheduler

VOCAB_SIZE = 1000


class Oracle:
    """Knows what every request will be told, and lies in the given places of a draft."""

    def __init__(self, wrong=()):
        self.wrong = set(wrong)
        self.futures = {}
        self.forgotten = []

    def propose(self, sequence, num_tokens):
        future = self.futures[sequence.request.request_id][sequence.num_output_tokens :][:num_tokens]
        return tuple(VOCAB_SIZE if place in self.wrong else token_id for place, token_id in enumerate(future))

    def forget(self, sequence):
        self.forgotten.append(sequence.sequence_id)


def serve(oracle, requests, num_blocks=64, **config):
    """Runs the requests to their end; their tokens, the plans, and the scheduler."""
    scheduler = make_scheduler(num_blocks, speculation=oracle, **config)
    runner = PseudoRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
    tokens, plans = {request.request_id: [] for request in requests}, []
    for request in requests:
        params = request.sampling_params
        oracle.futures[request.request_id] = completion(request, params.max_tokens)
        scheduler.add(request)
    while scheduler.has_work:
        plans.append(scheduler.plan())
        for delta in scheduler.commit(plans[-1], runner.run(plans[-1])):
            tokens[delta.attempt] += delta.token_ids
        scheduler.check_integrity()
    return tokens, plans, scheduler


def completion(request, num_tokens):
    params = request.sampling_params
    stop = [EOS, *params.stop_token_ids]
    return pseudo_completion(request.prompt_token_ids, params.seed, num_tokens, VOCAB_SIZE, stop)


def num_drafts(plan):
    return [max(0, sequence.num_draws - 1) for sequence in plan.sequences]


@pytest.mark.parametrize("wrong", [(), (0,), (1,), (0, 3), range(64)], ids=str)
def test_tokens_do_not_depend_on_drafts(wrong):
    requests = [make_request(f"r{i}", prompt_len=3 + 5 * i, max_tokens=30, seed=i) for i in range(4)]
    tokens, _, scheduler = serve(Oracle(wrong), requests)
    assert tokens == {request.request_id: completion(request, 30) for request in requests}
    stats = scheduler.stats()
    assert stats.num_draft_tokens > 0
    assert (stats.num_accepted_tokens > 0) == (0 not in wrong)


def test_right_drafts_save_most_steps_and_are_all_counted():
    tokens, plans, scheduler = serve(Oracle(), [make_request("r", max_tokens=60, seed=2)])
    stats = scheduler.stats()
    assert len(tokens["r"]) == 60
    assert len(plans) == 1 + 60 - 1 - stats.num_accepted_tokens
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert len(plans) < 14


def test_wrong_drafts_soon_end():
    _, plans, scheduler = serve(Oracle(range(64)), [make_request("r", max_tokens=90, seed=2)])
    assert len(plans) == 90
    assert scheduler.stats().num_draft_tokens < 30
    assert sum(map(any, map(num_drafts, plans[8:16]))) == 0


def test_only_those_who_decode_are_drafted():
    requests = [make_request("a", max_tokens=20), make_request("b", prompt_len=80, max_tokens=4)]
    _, plans, _ = serve(Oracle(), requests, max_num_batched_tokens=16)
    for plan in plans:
        for sequence in plan.sequences:
            if sequence.num_draws > 1:
                assert len(sequence.token_ids) == sequence.num_draws


def test_a_draft_ends_before_the_output_does():
    _, plans, _ = serve(Oracle(), [make_request("r", max_tokens=5)])
    outputs = 0
    for plan in plans:
        assert outputs + 1 + max(num_drafts(plan)) <= 5
        outputs += max(sequence.num_draws for sequence in plan.sequences)
    assert outputs == 5


def test_tokens_after_a_stop_token_in_a_draft_are_dropped():
    whole = completion(make_request("r"), 40)
    stop = whole[11]
    tokens, _, scheduler = serve(Oracle(), [make_request("r", max_tokens=40, stop_token_ids=[stop])])
    assert tokens["r"] == whole[: whole.index(stop) + 1]
    assert scheduler.stats().num_used_blocks == 0


@pytest.mark.parametrize("budget", [5, 9, 16])
def test_a_step_keeps_its_budget_of_tokens(budget):
    requests = [make_request(f"r{i}", max_tokens=30, seed=i) for i in range(4)]
    _, plans, _ = serve(Oracle(), requests, max_num_batched_tokens=budget)
    assert max(plan.num_tokens for plan in plans) <= budget
    assert any(any(num_drafts(plan)) for plan in plans)


def test_a_step_keeps_its_budget_of_rows():
    config = SchedulerConfig(max_num_seqs=3)
    assert max_num_draws(config, SpeculationConfig()) == 3
    assert max_num_draws(config, SpeculationConfig(speculative="suffix", num_speculative_tokens=5)) == 8
    requests = [make_request(f"r{i}", max_tokens=60, seed=i) for i in range(3)]
    _, plans, _ = serve(Oracle(), requests, max_num_seqs=3)
    num_rows = [sum(sequence.num_draws for sequence in plan.sequences) for plan in plans]
    assert max(num_rows) == 3 + 8


def test_nobody_is_preempted_for_a_draft():
    """Two sequences that fit the cache exactly: without drafts nobody is preempted."""
    requests = [make_request(f"r{i}", prompt_len=8, max_tokens=25, seed=i) for i in range(2)]
    tokens, plans, scheduler = serve(Oracle(), requests, num_blocks=16)
    assert scheduler.stats().num_preemptions == 0
    assert any(any(num_drafts(plan)) for plan in plans)
    assert tokens == {request.request_id: completion(request, 25) for request in requests}


def test_under_preemption_tokens_are_the_same():
    requests = [make_request(f"r{i}", prompt_len=8, max_tokens=40, seed=i) for i in range(6)]
    tokens, _, scheduler = serve(Oracle((2,)), requests, num_blocks=20, prefix_caching=True)
    assert scheduler.stats().num_preemptions > 0
    assert tokens == {request.request_id: completion(request, 40) for request in requests}


def test_blocks_lent_to_wrong_drafts_come_back():
    scheduler = make_scheduler(speculation=Oracle(range(64)))
    scheduler._drafter._proposer.futures["r"] = list(range(50))
    scheduler.add(make_request("r", prompt_len=4, max_tokens=50))
    for _ in range(3):
        plan = scheduler.plan()
        scheduler.commit(plan, make_result(plan))
        assert scheduler.stats().num_wasted_slots < BLOCK_SIZE


def test_the_prefix_cache_holds_no_block_with_a_wrong_draft():
    _, _, scheduler = serve(Oracle((1, 4)), [make_request("r", max_tokens=30)], prefix_caching=True)
    tokens = [*make_request("r").prompt_token_ids, *completion(make_request("r"), 30)]
    assert scheduler.stats().num_cached_blocks == (len(tokens) - 1) // BLOCK_SIZE
    again = make_request("again", prompt=tuple(tokens), max_tokens=1)
    scheduler._drafter._proposer.futures["again"] = []
    scheduler.add(again)
    assert scheduler.plan().sequences[0].first_position == (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_ended_and_aborted_sequences_leave_nothing_behind():
    oracle = Oracle()
    _, _, scheduler = serve(oracle, [make_request("r", max_tokens=9)])
    for request_id in ("waiting", "running"):
        oracle.futures[request_id] = [7] * 99
    scheduler.add(make_request("running", max_tokens=50))
    for _ in range(3):
        plan = scheduler.plan()
        scheduler.commit(plan, make_result(plan))
    plan = scheduler.plan()
    scheduler.abort("running")
    scheduler.commit(plan, make_result(plan))
    scheduler.add(make_request("waiting"))
    scheduler.abort("waiting")
    assert oracle.forgotten == [0, 1, 2]
    scheduler.check_integrity()


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_repetition_is_guessed(method):
    scheduler = make_scheduler(speculation=SpeculationConfig(speculative=method))
    scheduler.add(make_request("r", max_tokens=40))
    num_steps = 0
    while scheduler.has_work:  # every draw is a 7
        plan = scheduler.plan()
        scheduler.commit(plan, make_result(plan))
        num_steps += 1
    assert num_steps < 14


# --- With a draft model ---


class GuessingRunner(PseudoRunner):
    """A pseudo-model with a draft model, which guesses from what its own cache holds and is right if that is."""

    def __init__(self, num_blocks, lies=()):
        super().__init__(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
        self._draft = PseudoRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
        self._lies = set(lies)
        self.num_read = 0

    def run(self, plan):
        drafts = tuple(self._guess(s, s.drafting) if s.drafting else () for s in plan.sequences)
        result = super().run(plan.with_drafts(drafts))
        return StepResult(step_id=result.step_id, token_ids=result.token_ids, drafts=drafts)

    def _guess(self, sequence, drafting: Drafting):
        self.num_read += len(drafting.token_ids)
        drafts, first, fed = (), drafting.first_position, drafting.token_ids
        for place in range(max(1, drafting.num_drafts)):
            share = sequence.__class__(
                sequence_id=0, first_position=first, token_ids=fed, block_ids=sequence.block_ids,
                draw=sequence.draw, num_draws=1 if drafting.num_drafts else 0,
            )  # fmt: skip
            self._draft._write(share)
            if drafting.num_drafts:
                drawn = self._draft._draw(share)[0]
                drafts += (VOCAB_SIZE if place in self._lies else drawn,)
            first, fed = first + len(fed), drafts[-1:]
        return drafts


def serve_guessing(requests, lies=(), num_blocks=64, **config):
    scheduler = make_scheduler(num_blocks, speculation=SpeculationConfig(speculative="draft"), **config)
    runner = GuessingRunner(num_blocks, lies)
    tokens = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan.num_tokens + sum(s.drafting.num_drafts for s in plan.sequences if s.drafting) <= 32
        for delta in scheduler.commit(plan, runner.run(plan)):
            tokens[delta.attempt] += delta.token_ids
        scheduler.check_integrity()
    assert tokens == {r.request_id: completion(r, r.sampling_params.max_tokens) for r in requests}
    return scheduler.stats(), runner


def test_a_draft_model_that_reads_everything_is_always_right():
    requests = [make_request(f"r{i}", prompt_len=5 + 9 * i, max_tokens=40, seed=i) for i in range(3)]
    stats, _ = serve_guessing(requests)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 60


def test_it_reads_each_token_once():
    stats, runner = serve_guessing([make_request("r", prompt_len=50, max_tokens=40)])
    # Of each draft that came true in full, the last token is read with the next step's; the end is never read.
    assert 50 <= runner.num_read <= 50 + 40
    assert stats.num_steps < 15


def test_what_it_reads_after_wrong_guesses_is_right():
    """After a wrong guess it is right again, which it could not be with wrong tokens in its cache."""
    stats, _ = serve_guessing([make_request("r", prompt_len=6, max_tokens=60)], lies=(3,))
    full = stats.num_draft_tokens - stats.num_accepted_tokens
    assert stats.num_accepted_tokens > full > 0


def test_a_prefix_out_of_the_cache_has_been_read():
    requests = [make_request(f"r{i}", prompt_len=40, max_tokens=30, seed=i) for i in range(3)]
    stats, _ = serve_guessing(requests, prefix_caching=True, max_num_seqs=1)
    assert stats.num_prefix_hit_tokens > 0
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_after_a_preemption_it_reads_again():
    requests = [make_request(f"r{i}", prompt_len=8, max_tokens=40, seed=i + 2) for i in range(6)]
    stats, _ = serve_guessing(requests, num_blocks=20)
    assert stats.num_preemptions > 0
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_a_sleeping_one_costs_no_reading():
    stats, runner = serve_guessing([make_request("r", prompt_len=4, max_tokens=90)], lies=range(64))
    assert stats.num_draft_tokens < 30
    assert runner.num_read < 60
