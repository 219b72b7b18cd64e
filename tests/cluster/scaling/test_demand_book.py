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


def test_counts_grow_with_what_routers_count_and_not_with_routers():
    """A router that is seen for the first time, or again, brings its whole past: that is no burst."""
    book = DemandBook()
    book.follow("a", None, 0.0)

    def tell(router_id: str, now_s: float, num_arrived: int, num_first_tokens: int, num_left: int = 0) -> None:
        counts = {"num_arrived": num_arrived, "num_first_tokens": num_first_tokens, "num_left": num_left}
        book.note(router_id, [ModelDemand(model="a", **counts)], now_s)

    def counts(now_s: float) -> tuple[int, int, int]:
        demand = book.demand("a", now_s)
        assert demand is not None
        return demand.num_arrived, demand.num_first_tokens, demand.num_left

    tell("r1", 0.0, 10_000, 9_990)
    assert counts(0.0) == (0, 0, 0)
    tell("r1", 1.0, 10_005, 9_993, 2)
    assert counts(1.0) == (5, 3, 2)
    tell("r2", 1.0, 30_000, 29_000)
    assert counts(1.0) == (5, 3, 2), "another router comes"
    tell("r2", 2.0, 30_001, 29_001)
    assert counts(2.0) == (6, 4, 2)
    book.expire(20.0)
    tell("r1", 20.0, 20_000, 19_000)
    assert counts(20.0) == (6, 4, 2), "it was silent"
    tell("r1", 21.0, 3, 1)
    assert counts(21.0) == (9, 5, 2), "it has begun anew"
