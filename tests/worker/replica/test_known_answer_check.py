"""When a replica is asked what it has answered before, and what counts as an answer. On a pseudo-model."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from holdfast.worker.engine.engine import Engine
from holdfast.worker.errors import HoldfastError, InternalError, ReplicaError
from holdfast.worker.replica.known_answer import NUM_OUTPUT_TOKENS, NUM_PROMPT_TOKENS, KnownAnswerCheck
from holdfast.worker.step_plan import NO_TOKEN, StepPlan, StepResult
from holdfast.worker.step_update import StepUpdate
from tests.pseudo_model import PseudoRunner
from tests.worker.schedulers import BLOCK_SIZE, make_request, make_scheduler

TIMEOUT_S = 60


class Listener:
    def __init__(self) -> None:
        self.failed = threading.Event()
        self.error: HoldfastError | None = None
        self.rejected: dict[object, HoldfastError] = {}

    def on_update(self, update: StepUpdate) -> None:
        self.rejected |= {item.attempt: item.error for item in update.rejections}

    def on_failure(self, error: HoldfastError) -> None:
        self.error = error
        self.failed.set()


class Rotting(PseudoRunner):
    """Draws another token once it is rotten, none without numbers; stands still while it is held."""

    def __init__(self) -> None:
        super().__init__(64, BLOCK_SIZE)
        self.is_rotten = False
        self.has_numbers = True
        self.entered, self.may_step = threading.Event(), threading.Event()
        self.may_step.set()

    def hold(self) -> None:
        self.entered.clear()
        self.may_step.clear()

    def run(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.may_step.wait(TIMEOUT_S)
        result = super().run(plan)
        if self.is_rotten:
            worse = tuple(tuple(token_id + 1 for token_id in drawn) for drawn in result.token_ids)
            result = StepResult(step_id=plan.step_id, token_ids=worse)
        if not self.has_numbers:
            none = tuple((NO_TOKEN,) * len(drawn) for drawn in result.token_ids)
            result = StepResult(step_id=plan.step_id, token_ids=none)
        return result


class Poisonable(Rotting):
    """Has non-finite logits for sequences with one token, as a model that overflows at it."""

    POISON = 777

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        drawn = [
            (NO_TOKEN,) * len(tokens) if self.POISON in sequence.token_ids else tokens
            for sequence, tokens in zip(plan.sequences, result.token_ids, strict=True)
        ]
        return StepResult(step_id=plan.step_id, token_ids=tuple(drawn))


class Broken(PseudoRunner):
    def __init__(self) -> None:
        super().__init__(64, BLOCK_SIZE)

    def run(self, plan: StepPlan) -> StepResult:
        raise ReplicaError("a rank was lost")


class CheckedEngine:
    """An engine with a known-answer check, and what it was found guilty of."""

    def __init__(self, runner: PseudoRunner | None = None, every_s: float = 3600, **scheduler: object) -> None:
        self.runner = runner or Rotting()
        settings = {"max_model_len": 200, "prefix_caching": True, **scheduler}
        self.engine = Engine(make_scheduler(**settings), self.runner, idle_s=0.05)
        self.wrongs: list[HoldfastError] = []
        info = SimpleNamespace(vocab_size=1000, max_sequence_len=200)
        self.known_answer_check = KnownAnswerCheck(self.engine, info, self.wrongs.append, every_s=every_s)
        self.engine.start()

    def until(self, condition: Callable[[], bool]) -> None:
        """Each look waits for the end of a step."""
        for _ in range(100_000):
            if condition():
                return
            self.engine.stats(TIMEOUT_S)
        raise AssertionError("it never happened")

    def until_answered(self) -> None:
        self.until(lambda: self.known_answer_check._open is None)
        self.engine.stats(TIMEOUT_S)  # the engine's thread has gone on from there: its counts are of that answer


@pytest.fixture
def asked() -> Iterator[CheckedEngine]:
    asked = CheckedEngine()
    assert len(asked.known_answer_check.begin()) == 4
    yield asked
    asked.runner.may_step.set()
    asked.engine.stop()


def test_it_is_computed_each_time_and_is_small(asked):
    for _ in range(3):
        assert asked.known_answer_check.ask()
        asked.until_answered()
    assert asked.known_answer_check.num_right == 3
    stats = asked.engine.stats()
    assert stats.num_prefix_hit_tokens == 0, "an answer out of the cache would say nothing"
    assert stats.num_tokens_computed == 4 * (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS - 1)
    assert stats.num_used_blocks == 0


def test_a_wrong_answer_says_where(asked):
    asked.runner.is_rotten = True
    asked.known_answer_check.ask()
    asked.until(lambda: bool(asked.wrongs))
    (wrong,) = asked.wrongs
    assert isinstance(wrong, ReplicaError)
    assert "self-check wrongly: " in str(wrong)
    assert asked.known_answer_check.num_right == 0


def test_a_question_for_which_the_model_has_no_numbers_is_answered_wrongly(asked):
    asked.runner.has_numbers = False
    asked.known_answer_check.ask()
    asked.until(lambda: bool(asked.wrongs))
    (wrong,) = asked.wrongs
    assert isinstance(wrong, ReplicaError)
    assert "self-check: the model's logits" in str(wrong)


def test_an_open_question_is_not_asked_twice(asked):
    asked.runner.hold()
    assert asked.known_answer_check.ask()
    assert not asked.known_answer_check.ask()
    asked.runner.may_step.set()
    asked.until_answered()
    assert asked.known_answer_check.ask()


def test_users_go_first_and_the_question_gets_its_turn():
    """One at a time, with a line of others: aging brings it to the front of them."""
    asked = CheckedEngine(max_num_seqs=1, aging_s=0.001)
    asked.known_answer_check.begin()
    listener = Listener()
    asked.engine.attach(listener)
    for number in range(300):
        asked.engine.submit(make_request(f"r{number}", max_tokens=30), listener)
    asked.known_answer_check.ask()
    asked.until(lambda: asked.known_answer_check.num_right == 1)
    assert asked.engine.load.num_waiting > 0
    asked.engine.stop()


def test_a_refusal_is_no_wrong_answer():
    asked = CheckedEngine(max_num_seqs=1, max_num_waiting=1)
    asked.known_answer_check.begin()
    listener = Listener()
    asked.engine.attach(listener)
    asked.runner.hold()
    asked.engine.submit(make_request("runs"), listener)
    assert asked.runner.entered.wait(TIMEOUT_S)
    asked.engine.submit(make_request("waits"), listener)
    asked.known_answer_check.ask()
    asked.runner.may_step.set()
    asked.until_answered()
    assert (asked.wrongs, asked.known_answer_check.num_right) == ([], 0)
    asked.until(lambda: not asked.engine.has_work)
    asked.known_answer_check.ask()
    asked.until_answered()
    assert (asked.wrongs, asked.known_answer_check.num_right) == ([], 1)
    asked.engine.stop()


def test_an_abort_at_the_end_is_no_wrong_answer(asked):
    asked.runner.hold()
    asked.known_answer_check.ask()
    assert asked.runner.entered.wait(TIMEOUT_S)
    stopping = threading.Thread(target=asked.engine.stop)
    stopping.start()
    asked.runner.may_step.set()
    stopping.join(TIMEOUT_S)
    assert asked.wrongs == []
    with pytest.raises(ReplicaError):
        asked.known_answer_check.ask()


def test_a_question_that_does_not_fit_is_not_asked():
    asked = CheckedEngine(num_blocks=1)
    assert asked.known_answer_check.begin() == b""
    asked.engine.stop()


def test_an_engine_that_ends_before_the_first_answer_says_why():
    asked = CheckedEngine(Broken())
    with pytest.raises(ReplicaError, match="a rank was lost"):
        asked.known_answer_check.begin()
    asked.engine.stop()


def test_once_started_it_asks_by_itself_until_it_is_stopped():
    asked = CheckedEngine(every_s=0.001)
    asked.known_answer_check.begin()
    asked.known_answer_check.start()
    asked.until(lambda: asked.known_answer_check.num_right >= 3)
    asked.known_answer_check.stop()
    asked.known_answer_check._loop._thread.join(TIMEOUT_S)
    assert asked.known_answer_check._loop._thread.daemon
    assert not asked.known_answer_check._loop._thread.is_alive()
    asked.engine.stop()


def test_it_stops_asking_an_engine_that_has_ended():
    asked = CheckedEngine(every_s=0.001)
    asked.known_answer_check.begin()
    asked.known_answer_check.start()
    asked.engine.stop()
    asked.known_answer_check._loop._thread.join(TIMEOUT_S)
    assert not asked.known_answer_check._loop._thread.is_alive()


# --- in doubt ---


def poisoned(name: str):
    return make_request(name, prompt=(5, Poisonable.POISON, 6))


def begin(asked: CheckedEngine, begins: bool) -> None:
    """With a first answer, or without one, as where self-checks are off or bits depend on the batch."""
    if begins:
        asked.known_answer_check.begin()
    else:
        asked.known_answer_check.stand_by()


@pytest.mark.parametrize("begins", [True, False], ids=["compared", "in doubt alone"])
def test_clients_whose_requests_have_no_numbers_end_no_replica_that_answers_rightly(begins):
    asked = CheckedEngine(Poisonable())
    begin(asked, begins)
    listener = Listener()
    asked.engine.attach(listener)
    for turn in range(3):
        asked.runner.hold()
        asked.engine.submit(make_request(f"first-{turn}", max_tokens=1), listener)
        assert asked.runner.entered.wait(TIMEOUT_S)
        names = {f"bad-{turn}-{number}" for number in range(2)}
        for name in names:
            asked.engine.submit(poisoned(name), listener)
        asked.runner.may_step.set()
        asked.until(lambda names=names: names <= set(listener.rejected))
    assert {type(error) for error in listener.rejected.values()} == {InternalError}
    assert (asked.wrongs, listener.error) == ([], None)
    assert asked.known_answer_check.num_right >= 3
    asked.engine.stop()


@pytest.mark.parametrize("begins", [True, False], ids=["compared", "in doubt alone"])
def test_several_without_numbers_end_a_replica_that_answers_wrongly(begins):
    asked = CheckedEngine(Poisonable())
    begin(asked, begins)
    listener = Listener()
    asked.engine.attach(listener)
    asked.runner.has_numbers = False
    asked.runner.hold()
    for number in range(2):
        asked.engine.submit(make_request(f"fine-{number}"), listener)
    asked.runner.may_step.set()
    asked.until(lambda: bool(asked.wrongs))
    assert listener.rejected == {}, "they may go on elsewhere"
    asked.engine.stop()


def test_one_that_stands_by_asks_nothing_until_then_and_compares_nothing():
    asked = CheckedEngine(Poisonable())
    asked.known_answer_check.stand_by()
    listener = Listener()
    asked.engine.attach(listener)
    assert not asked.known_answer_check.has_answer
    assert asked.engine.stats(TIMEOUT_S).num_requests == 0
    for turn in range(2):
        asked.runner.is_rotten = turn == 1  # as other weights: another answer, with finite logits
        for number in range(3):
            name = f"bad-{turn}-{number}"
            asked.engine.submit(poisoned(name), listener)
            asked.until(lambda name=name: name in listener.rejected)
        assert asked.known_answer_check.num_right == turn + 1
    assert (asked.wrongs, listener.error) == ([], None)
    asked.engine.stop()


def test_a_replica_too_small_for_the_question_ends_as_nobody_can_be_asked():
    asked = CheckedEngine(Poisonable(), num_blocks=8)
    asked.known_answer_check.stand_by()
    listener = Listener()
    asked.engine.attach(listener)
    for number in range(2):
        asked.engine.submit(poisoned(f"bad-{number}"), listener)
        asked.until(lambda number=number: f"bad-{number}" in listener.rejected)
    assert {type(error) for error in listener.rejected.values()} == {InternalError}
    asked.engine.submit(poisoned("bad-2"), listener)
    asked.until(lambda: bool(asked.wrongs))
    asked.engine.stop()


@pytest.mark.parametrize("begins", [True, False], ids=["compared", "in doubt alone"])
def test_a_question_in_doubt_for_which_there_is_no_room_is_asked_again(begins):
    asked = CheckedEngine(Poisonable(), max_num_seqs=1, max_num_waiting=1)
    begin(asked, begins)
    listener = Listener()
    asked.engine.attach(listener)
    for number in range(2):  # alone, one after the other
        asked.engine.submit(poisoned(f"bad-{number}"), listener)
        asked.until(lambda number=number: f"bad-{number}" in listener.rejected)
    asked.runner.hold()
    asked.engine.submit(poisoned("bad-2"), listener)
    assert asked.runner.entered.wait(TIMEOUT_S)
    for number in range(3):
        asked.engine.submit(make_request(f"fine-{number}"), listener)
    asked.runner.may_step.set()
    asked.until(lambda: "bad-2" in listener.rejected)
    assert (asked.wrongs, listener.error) == ([], None)
    asked.engine.stop()
