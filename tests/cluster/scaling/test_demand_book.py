"""The demand book: who is followed, and what routers have told lately."""

from holdfast.cluster.scaling.demand_book import FOLLOWED_S, FRESH_S, PINNED_S, DemandBook
from holdfast.cluster.serve.directory import Directory
from holdfast.router.demand import ModelDemand


def test_what_routers_tell_is_added_up_while_it_is_fresh():
    book = DemandBook()
    book.note("r1", [ModelDemand(model="a", num_open=2), ModelDemand(model="b", num_open=7)], 0.0)
    book.note("r2", [ModelDemand(model="a", num_open=1)], 3.0)
    both = book.demand("a", 4.0)
    assert both is not None
    assert both.num_open == 3
    late = book.demand("a", 3.0 + FRESH_S)
    assert late is not None
    assert late.num_open == 1
    assert book.demand("a", 9.0 + FRESH_S) is None
    assert book.demand("unknown", 4.0) is None


def test_a_model_is_followed_while_someone_asks():
    book = DemandBook()
    assert book.follow("a", 60.0, 0.0)
    assert not book.follow("a", 60.0, 1.0)
    assert book.follow("a", None, 2.0)
    assert book.followed == (("a", None),)
    assert not book.expire(FOLLOWED_S)
    assert book.expire(3.0 + FOLLOWED_S)
    assert book.followed == ()


def test_only_a_change_of_what_is_followed_makes_a_new_version_of_the_directory():
    directory = Directory(0.0)
    version = directory.snapshot(0.0).version
    assert directory.demand("a", 60.0, 1.0) == (None, True)
    assert directory.snapshot(1.0).version == version + 1
    assert directory.snapshot(1.0).followed == (("a", 60.0),)
    directory.note_demand("r", [ModelDemand(model="a", num_open=1)], 2.0)
    demand, is_news = directory.demand("a", 60.0, 2.0)
    assert demand is not None
    assert (demand.num_open, is_news, directory.snapshot(2.0).version) == (1, False, version + 1)


def test_what_an_update_has_set_holds_until_it_ends_or_for_an_hour():
    book = DemandBook()
    book.pin("ns:a", 2, 0.0)
    book.pin("ns:a#2", 1, 10.0)
    assert book.pinned(20.0) == {"ns:a": 2, "ns:a#2": 1}
    book.pin("ns:a", None, 30.0)
    book.pin("ns:unknown", None, 30.0)
    assert book.pinned(30.0) == {"ns:a#2": 1}
    assert book.pinned(11.0 + PINNED_S) == {}
