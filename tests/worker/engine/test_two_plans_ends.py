"""What ends while two plans are in flight: by a stop token, an abort, a deadline, lost numbers; and who gives way."""

from dataclasses import replace

from holdfast.worker.errors import DeadlineExceededError
from holdfast.worker.request import FinishReason, Priority
from holdfast.worker.step_plan import NO_TOKEN, StepPlan, StepResult
from tests.pseudo_model import PseudoRunner
from tests.worker.engine.two_plans import BLOCK_SIZE, VOCAB_SIZE, Turns, completion


def test_after_a_stop_token_the_token_of_the_step_ahead_is_thrown_away():
    stop = completion(6)[5]
    turns = Turns()
    turns.submit("r", max_tokens=20, stop_token_ids=(stop,))
    turns.run()
    assert (turns.listener.tokens("r"), turns.listener.ended["r"]) == (completion(6), FinishReason.STOP)
    assert turns.device.num_launched == 7
    turns.check_end()


def test_blocks_of_who_has_ended_are_free_once_the_step_ahead_is_done():
    stop = completion(6)[5]
    turns = Turns(caching=False)
    turns.submit("r", max_tokens=20, stop_token_ids=(stop,))
    while "r" not in turns.listener.ended:
        turns.turn()
    assert turns.engine.has_work
    assert turns.engine._core.scheduler.stats().num_used_blocks == 3
    turns.turn()
    turns.check_end()


def test_an_abort_with_two_plans_in_flight_is_the_last_word():
    turns = Turns(num_blocks=8, caching=False)
    turns.submit("r", max_tokens=28)
    for _ in range(6):
        turns.turn()
    num_tokens = len(turns.listener.tokens("r"))
    turns.engine._launch_steps(turns.clock.now)
    assert turns.device.most_in_flight == 2
    turns.engine._core.abort("r")
    assert turns.engine._core.scheduler.stats().num_used_blocks > 0
    turns.submit("next", max_tokens=28)
    turns.run()
    assert (turns.listener.tokens("r"), turns.listener.ended["r"]) == (completion(num_tokens), FinishReason.ABORT)
    assert turns.listener.tokens("next") == completion(28)
    turns.check_end()


def test_a_deadline_that_passes_with_two_plans_in_flight_ends_a_request_once():
    turns = Turns()
    turns.submit("late", max_tokens=100, time_left_s=5.0)
    turns.submit("patient", max_tokens=12)
    turns.run()
    assert isinstance(turns.listener.ended["late"], DeadlineExceededError)
    assert turns.listener.tokens("late") == completion(len(turns.listener.tokens("late")))
    assert turns.listener.tokens("patient") == completion(12)
    turns.check_end()


def test_nobody_is_preempted_before_a_result():
    turns = Turns(num_blocks=8, max_num_seqs=4)
    for number in range(4):
        turns.submit(f"r{number}", prompt=(number, 1, 2), max_tokens=20)
    turns.run()
    assert turns.engine._core.scheduler.stats().num_preemptions > 0
    assert turns.device.num_ahead > 10
    for number in range(4):
        assert turns.listener.tokens(f"r{number}") == completion(20, (number, 1, 2))
    turns.check_end()


def test_a_better_class_gets_its_place_although_plans_ahead_preempt_nobody():
    turns = Turns(max_num_seqs=1)
    turns.submit("low", max_tokens=50, priority=Priority.LOW)
    for _ in range(3):
        turns.turn()
    turns.submit("critical", max_tokens=4, priority=Priority.CRITICAL)
    turns.run()
    assert list(turns.listener.ended) == ["critical", "low"]
    assert turns.listener.tokens("low") == completion(50)


class WithoutNumbers(PseudoRunner):
    """Has no token for the sequence `victim` in its step `step_id`."""

    victim, step_id = 1, 5

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        tokens = [
            (NO_TOKEN,) if (share.sequence_id, plan.step_id) == (self.victim, self.step_id) else drawn
            for share, drawn in zip(plan.sequences, result.token_ids, strict=True)
        ]
        return replace(result, token_ids=tuple(tokens))


def test_who_has_no_numbers_fails_alone_and_its_blocks_are_found_by_nobody():
    turns = Turns(WithoutNumbers(64, BLOCK_SIZE, VOCAB_SIZE))
    for number in range(3):
        turns.submit(f"r{number}", prompt=(number, *range(9)), max_tokens=12)
    turns.run()
    assert "not finite" in str(turns.listener.ended["r1"])
    for number in (0, 2):
        assert turns.listener.tokens(f"r{number}") == completion(12, (number, *range(9)))
    assert turns.scheduler._allocator.num_cached == 2 * 5
    turns.check_end()
