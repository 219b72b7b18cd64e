"""The byte ledger: what is taken is given back, budgets hold exactly, and the greediest is never a modest one."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.config import OverloadConfig
from holdfast.router.overload.byte_ledger import GREEDY_BYTES, UNREAD_TOKEN_BYTES, ByteLedger, Lease
from holdfast.worker.errors import ByteBudgetError

MIB = 2**20
BUDGETS = OverloadConfig(max_connection_bytes=2 * MIB, max_key_bytes=3 * MIB, max_router_bytes=4 * MIB)


@pytest.fixture
def ledger() -> ByteLedger:
    return ByteLedger(BUDGETS)


@pytest.mark.parametrize(
    ("others", "setting", "left"),
    [
        ([("c", "k", 1)], "overload.max_connection_bytes", 1),
        ([("c2", "k", 2)], "overload.max_key_bytes", 1),
        ([("c2", "k2", 2), ("c3", "k3", 1)], "overload.max_router_bytes", 1),
    ],
    ids=["connection", "key", "router"],
)
def test_each_budget_holds_to_the_byte_and_says_its_name(ledger, others, setting, left):
    for connection, key, mib in others:
        ledger.open(connection, key).take(mib * MIB)
    lease = ledger.open("c", "k")
    lease.take(left * MIB)
    with pytest.raises(ByteBudgetError, match=rf"exceed \d+ \({setting}\)") as refused:
        lease.take(1)
    assert refused.value.retry_after_s is not None
    assert lease.num_bytes == left * MIB
    assert ledger.refusals == {setting: 1}
    lease.give_back()
    lease.take(left * MIB)
    ledger.check_integrity()


def test_a_lease_moves_to_its_callers_account_with_what_it_holds(ledger):
    ledger.open("c1", "alice").take(2 * MIB)
    lease = ledger.open("c2", "127.0.0.1")
    lease.take(MIB)
    lease.belongs_to("alice")
    with pytest.raises(ByteBudgetError, match="max_key_bytes"):
        ledger.open("c3", "alice").take(1)
    ledger.open("c3", "127.0.0.1").take(MIB)
    ledger.check_integrity()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 3 * MIB), st.booleans())))
def test_what_is_taken_comes_back(requests):
    ledger = ByteLedger(BUDGETS)
    leases = []
    for connection, key, num_bytes, ends in requests:
        lease = ledger.open(connection, key)
        leases.append(lease)
        try:
            lease.take(num_bytes)
        except ByteBudgetError:
            assert lease.num_bytes == 0
        if ends:
            lease.close()
        ledger.check_integrity()
        assert ledger.num_bytes <= BUDGETS.max_router_bytes
    for lease in leases:
        lease.close()
        lease.close()
    assert ledger.num_bytes == ledger.num_leases == ledger.held_bytes == 0
    ledger.check_integrity()


@dataclass
class Answer:
    """One whose client has not read so many tokens."""

    num_unread: int
    errors: list[Exception] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


def _holding(ledger: ByteLedger, account: str, *, read: int = 0, unread: int = 0) -> Lease:
    lease = ledger.open(account, account)
    lease.take(read)
    lease.endings.append(Answer(unread // UNREAD_TOKEN_BYTES))
    return lease


def test_the_greediest_is_the_largest_request_of_the_account_that_holds_the_most(ledger):
    _holding(ledger, "modest", read=MIB)
    _holding(ledger, "greedy", read=MIB // 2)
    worst = _holding(ledger, "greedy", unread=MIB)
    assert ledger.greediest() is worst
    (answer,), error = worst.endings, ByteBudgetError("greedy")
    worst.end(error)
    assert answer.errors == [error]
    worst.close()
    assert ledger.greediest() is not worst


def test_a_request_that_holds_little_is_not_ended_however_much_its_account_holds(ledger):
    assert ledger.greediest() is None
    for _ in range(10):
        _holding(ledger, "many", unread=GREEDY_BYTES - UNREAD_TOKEN_BYTES)
    other = _holding(ledger, "one", unread=GREEDY_BYTES)
    assert ledger.greediest() is None
    for lease in list(ledger._leases):
        if lease is not other:
            lease.close()
    assert ledger.greediest() is other


def test_what_cannot_be_ended_is_not_chosen(ledger):
    lease = ledger.open("c", "k")
    lease.take(MIB)
    assert ledger.greediest() is None
