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
    answers.add(newer, X)
    answers.drop(newer, X)
    assert not answers.abort("x")
    answers.add(older, X)
    answers.add(newer, X)
    answers.drop(older, X)
    assert answers.abort("x")
    assert (older.num_aborts, newer.num_aborts) == (0, 1)
    answers.drop(newer, X)
    assert not answers.abort("x")


def test_an_answer_that_is_over_was_not_open():
    answers = OpenAnswers()
    answers.add(Answer(was_open=False), X)
    assert not answers.abort("x")
