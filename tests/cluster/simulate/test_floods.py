"""A tenant that floods a cluster, in virtual time: with a rate on its key, nobody else's latency moves by a tenth."""

from typing import Any

import pytest

from holdfast.cluster.simulate.kernel.network import Connection
from holdfast.router.events import Fail
from holdfast.router.request import GenerationRequest
from holdfast.router.security.gate import Caller, Gate
from holdfast.worker.errors import RateLimitError
from tests.cluster.simulate.test_shares import BEGIN_S, Customer, Overload
from tests.router.security.test_gate import Keys, key_of, secret_of

NUM_POLITE, EVERY_S = 200, 0.5
FLOOD_PER_S = 20
"""Ten times what the polite tenant sends, and several times what the cluster can do."""
NUM_PROMPT, NUM_OUTPUT = 16, 6
RATE = {"requests_per_minute": 6, "tokens_per_minute": 240}


class Timed(Customer):
    """A request whose duration is kept, and which is charged to its key at its end."""

    def __init__(self, load: "Street", tenant: str, caller: Caller) -> None:
        super().__init__(load, tenant, NUM_PROMPT, NUM_OUTPUT)
        self.street, self.caller = load, caller

    def send_by_key(self) -> None:
        now = self.load.timeline.now
        try:
            self.caller.charged(GenerationRequest(prompt=(1,) * NUM_PROMPT), now)
        except RateLimitError:
            self.street.num_refused += 1
            return
        self.caller.took_tokens(NUM_PROMPT, now)
        self.sent_s = now
        self.send()

    def receive(self, connection: Connection, message: Any) -> None:
        if not isinstance(message, Fail):  # a full queue
            super().receive(connection, message)

    def closed(self, connection: Connection) -> None:
        now = self.load.timeline.now
        self.caller.took_tokens(NUM_OUTPUT, now)
        self.street.durations_s[self.tenant].append(now - self.sent_s)


class Street(Overload):
    """A polite tenant's requests at fixed times, and those of one that floods."""

    def __init__(self, gate: Gate, *, with_flood: bool) -> None:
        super().__init__()
        self.num_refused = 0
        self.durations_s: dict[str, list[float]] = {"polite": [], "flood": []}
        callers = {name: gate.enter(secret_of(name)) for name in self.durations_s}
        end_s = BEGIN_S + NUM_POLITE * EVERY_S
        for number in range(NUM_POLITE):
            self.timeline.at(BEGIN_S + number * EVERY_S, Timed(self, "polite", callers["polite"]).send_by_key)
        for number in range(int((end_s - BEGIN_S) * FLOOD_PER_S) * with_flood):
            self.timeline.at(BEGIN_S + number / FLOOD_PER_S, Timed(self, "flood", callers["flood"]).send_by_key)

    def p99_s(self) -> float:
        """Of the polite tenant's requests, once all of them have ended."""
        durations_s = self.durations_s["polite"]
        while len(durations_s) < NUM_POLITE and self.timeline.step():
            pass
        assert len(durations_s) == NUM_POLITE
        return sorted(durations_s)[NUM_POLITE * 99 // 100]


@pytest.fixture(scope="module")
def alone_s() -> float:
    return Street(Gate(), with_flood=False).p99_s()


def test_a_flood_is_refused_at_the_gate_and_moves_nobody_elses_p99_by_a_tenth(alone_s):
    gate = Gate(Keys(key_of("polite"), key_of("flood", **RATE)))
    street = Street(gate, with_flood=True)
    beside_s = street.p99_s()
    assert street.num_refused > 0.95 * NUM_POLITE * EVERY_S * FLOOD_PER_S
    assert street.durations_s["flood"], "it gets its rate"
    assert beside_s <= 1.1 * alone_s, (beside_s, alone_s)


@pytest.mark.slow
def test_without_a_rate_the_same_flood_would_move_it(alone_s):
    assert Street(Gate(), with_flood=True).p99_s() > 1.1 * alone_s
