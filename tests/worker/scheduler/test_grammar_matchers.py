"""Grammar matchers read each output once, take drafts back, and start over only where they must."""

import pytest

from holdfast.worker.draws import LogitsSettings
from holdfast.worker.grammar_matchers import NONE_FITS, GrammarMatchers, rows_with_grammars
from holdfast.worker.step_plan import ScheduledSequence, StepPlan
from tests.draw_params import draw_params

END = 0
ANY = 255


class CountingMatcher:
    """Anything goes but token 9; its mask is the output so far, which says what it has read."""

    def __init__(self, read: list[int]) -> None:
        self.output: list[int] = []
        self._read = read

    def compute_bitmask(self) -> bytes:
        return bytes((ANY, *self.output)) if self.output != [0] else bytes(9)

    def validate_tokens(self, tokens: list[int], /) -> int:
        return int(9 not in tokens)

    def consume_token(self, token: int, /) -> bool:
        return self.consume_tokens([token])

    def consume_tokens(self, tokens: list[int], /) -> bool:
        self.output += tokens
        self._read += tokens
        return True

    def rollback(self, num_tokens: int, /) -> bool:
        del self.output[-num_tokens:]
        return True

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


class BrokenMatcher(CountingMatcher):
    """Says what is wrong as llguidance does: in one line, and then with all that it knows."""

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return "too complex\n<state>\n</state><grammar>\na caller's own\n</grammar>"


@pytest.fixture
def read() -> list[int]:
    """All that matchers have read, in order."""
    return []


@pytest.fixture
def matchers(read: list[int]) -> GrammarMatchers:
    return GrammarMatchers(lambda grammar: CountingMatcher(read), frozenset({END}))


def plan(output: tuple[int, ...], drafts: tuple[int, ...] = (), *, sequence_id=1, step_id=1, grammar="g") -> StepPlan:
    draw = draw_params(
        seed=0,
        first_output_index=len(output),
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        logits_settings=LogitsSettings(grammar=grammar),
        output_token_ids=output,
    )
    sequence = ScheduledSequence(
        sequence_id=sequence_id,
        first_position=0,
        token_ids=(5, *drafts),
        block_ids=(0,),
        draw=draw,
        num_draws=1 + len(drafts),
    )
    return StepPlan(step_id=step_id, others=(sequence,))


def test_an_output_is_read_once(matchers, read):
    for length in range(5):
        assert matchers.masks(plan(tuple(range(1, 1 + length)))) == {0: bytes((ANY, *range(1, 1 + length)))}
    assert read == [1, 2, 3, 4]


def test_a_sequence_that_comes_with_output_is_read_from_its_beginning(matchers):
    assert matchers.masks(plan((1, 2, 3))) == {0: bytes((ANY, 1, 2, 3))}


def test_another_output_of_the_same_sequence_starts_over(matchers, read):
    matchers.masks(plan((1, 2, 3)))
    assert matchers.masks(plan((1, 4))) == {0: bytes((ANY, 1, 4))}
    assert read == [1, 2, 3, 1, 4]


def test_drafts_are_read_for_their_masks_and_taken_back(matchers):
    assert matchers.masks(plan((1,), (2, 3))) == {0: bytes((ANY, 1)), 1: bytes((ANY, 1, 2)), 2: bytes((ANY, 1, 2, 3))}
    assert matchers.masks(plan((1, 2, 4))) == {0: bytes((ANY, 1, 2, 4))}


@pytest.mark.parametrize("bad", [9, END])
def test_there_is_no_mask_after_a_draft_that_breaks_the_grammar_or_ends_the_output(bad, matchers):
    assert matchers.masks(plan((1,), (2, bad, 3))) == {0: bytes((ANY, 1)), 1: bytes((ANY, 1, 2))}


def test_rows_are_counted_over_all_draws_of_a_plan(matchers):
    parts = (plan((), (1, 2), grammar=""), plan((7,), sequence_id=2), plan((8,), sequence_id=3))
    both = StepPlan(step_id=1, others=tuple(part.sequences[0] for part in parts))
    assert matchers.masks(both) == {3: bytes((ANY, 7)), 4: bytes((ANY, 8))}
    assert (parts[0].has_grammars, both.has_grammars) == (False, True)


def test_matchers_of_sequences_that_are_gone_are_dropped(matchers):
    for number in range(100):
        matchers.masks(plan((), sequence_id=number, step_id=number))
    assert 0 < len(matchers) < 40


def test_a_matcher_in_an_error_lets_nothing_come_next_and_the_log_says_why_without_the_grammar(caplog):
    matchers = GrammarMatchers(lambda grammar: BrokenMatcher([]), frozenset({END}))
    assert matchers.masks(plan((1,))) == {0: NONE_FITS}
    assert caplog.messages == ["the output of sequence 1 is at a dead end: too complex"]
    assert len(matchers) == 0


def test_a_mask_without_a_bit_is_a_dead_end():
    matchers = GrammarMatchers(lambda grammar: CountingMatcher([]), frozenset({END}))
    assert matchers.masks(plan((0,))) == {0: NONE_FITS}


def test_the_rows_of_each_sequence_with_a_grammar():
    parts = (plan((), (1, 2), grammar=""), plan((7,), (1,), sequence_id=2), plan((8,), sequence_id=3))
    both = StepPlan(step_id=1, others=tuple(part.sequences[0] for part in parts))
    assert rows_with_grammars(both) == [range(3, 5), range(5, 6)]
