"""Which answer an id stands for, when it comes to ending one from outside."""

from holdfast.router.requests.answer import OpenAnswers
from holdfast.worker.request import RequestKey

X = RequestKey("", "x")


class Answer:
    def __init__(self, *, was_open: bool = True) -> None:
        self.was_open = was_open
        self.num_aborts = 0

    def abort(self) -> bool:
        self.num_aborts += 1
        return self.was_open


def test_the_newest_of_an_id_counts_and_an_older_one_that_leaves_does_not_take_it_along():
    answers, older, newer = OpenAnswers(), Answer(), Answer()
    with answers.holding(newer, X):
        pass
    assert not answers.abort("x")
    outer = answers.holding(older, X)
    outer.__enter__()
    with answers.holding(newer, X):
        outer.__exit__(None, None, None)
        assert answers.abort("x")
        assert (older.num_aborts, newer.num_aborts) == (0, 1)
    assert not answers.abort("x")


def test_an_answer_that_is_over_was_not_open():
    answers = OpenAnswers()
    with answers.holding(Answer(was_open=False), X):
        assert not answers.abort("x")
