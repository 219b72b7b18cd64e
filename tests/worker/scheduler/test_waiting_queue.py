"""The order of service: class, tenant, deadline, arrival; and how waiting betters the class."""

from holdfast.worker.request import Priority
from holdfast.worker.scheduler.sequence import Sequence
from holdfast.worker.waiting_queue import DUE_AFTER_S, TenantCounters, WaitingQueue
from tests.worker.schedulers import make_request


class Line:
    """Waiting sequences and their tenants, by the ids of the requests."""

    def __init__(self, aging_s: float = 10.0, **shares: float) -> None:
        self.tenants = TenantCounters(shares)
        self.waiting = WaitingQueue[Sequence](self.tenants, aging_s)
        self.sequences: dict[str, Sequence] = {}

    def add(self, request_id: str, now: float = 0.0, **fields: object) -> Sequence:
        request = make_request(request_id, **fields)
        sequence = Sequence(len(self.sequences), request, max_model_len=100, eos_token_ids=frozenset(), arrived_s=now)
        self.waiting.advance(now)
        self.waiting.add(sequence)
        self.sequences[request_id] = sequence
        return sequence

    def serve(self) -> str:
        """Takes the first out; its tenant is charged for a prompt of four tokens."""
        first = self.waiting.first()
        self.waiting.remove(first)
        self.waiting.check_integrity()
        first.tenant.charge(4, 0)
        return first.request.request_id

    def serve_all(self) -> list[str]:
        return [self.serve() for _ in range(len(self.waiting))]


def test_classes_go_before_all_else():
    line = Line()
    for priority in reversed(Priority):
        line.add(priority.name, priority=priority, time_left_s=10.0 * priority + 1, tenant=priority.name)
    line.tenants.of("CRITICAL").charge(100, 0)
    assert line.serve_all() == ["CRITICAL", "HIGH", "NORMAL", "LOW"]
    assert line.waiting.best_class is None


def test_of_one_tenant_the_earliest_deadline_goes_first_then_the_earliest_arrival():
    line = Line()
    for request_id, time_left_s in (("c", None), ("d", None), ("b", 9.0), ("a", 3.0)):
        line.add(request_id, time_left_s=time_left_s)
    assert list("abcd") == [sequence.request.request_id for sequence in line.waiting]
    assert line.serve_all() == list("abcd")


def test_an_endless_stream_of_deadlines_does_not_hold_up_one_without():
    line = Line(aging_s=1e9)
    line.add("patient")
    line.add("soon", now=DUE_AFTER_S - 31, time_left_s=30.0)
    line.add("later", now=DUE_AFTER_S - 29, time_left_s=30.0)
    assert line.serve_all() == ["soon", "patient", "later"]


def test_tenants_take_turns_whoever_has_more_requests():
    line = Line()
    for number in range(4):
        line.add(f"a{number}", tenant="a")
    for number in range(2):
        line.add(f"b{number}", tenant="b")
    assert line.serve_all() == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_tenant_with_twice_the_share_gets_twice_the_turns():
    line = Line(gold=2.0)
    for number in range(40):
        line.add(f"gold{number}", tenant="gold")
        line.add(f"free{number}", tenant="free")
    served = [line.serve()[:4] for _ in range(30)]
    assert served.count("gold") == 20


def test_a_tenant_that_was_away_does_not_catch_up_on_what_it_did_not_ask_for():
    line = Line()
    for number in range(20):
        line.add(f"a{number}", tenant="a")
    for _ in range(10):
        line.serve()
    for number in range(5):
        line.add(f"b{number}", tenant="b")
    assert [request_id[0] for request_id in line.serve_all()[:6]] in (list("ababab"), list("bababa"))


def test_every_aging_s_of_waiting_is_worth_a_class():
    line = Line(aging_s=10.0)
    low = line.add("low", priority=Priority.LOW)
    classes = []
    for now in (9.9, 10.0, 19.9, 20.0, 30.0, 99.0):
        line.waiting.advance(now)
        line.waiting.check_integrity()
        classes.append(low.service_class.name)
    assert classes == ["LOW", "NORMAL", "NORMAL", "HIGH", "CRITICAL", "CRITICAL"]


def test_a_long_silence_is_worth_several_classes_at_once():
    line = Line(aging_s=10.0)
    low = line.add("low", priority=Priority.LOW)
    line.waiting.advance(25.0)
    assert low.service_class is Priority.HIGH


def test_one_that_has_aged_stands_by_tenant_and_deadline_among_its_new_class():
    line = Line(aging_s=10.0)
    line.add("normal", priority=Priority.NORMAL)
    line.add("later", now=5.0, priority=Priority.HIGH)
    line.add("urgent", now=5.0, priority=Priority.HIGH, time_left_s=60.0)
    line.waiting.advance(10.0)
    assert line.serve_all() == ["urgent", "normal", "later"]


def test_time_that_is_not_spent_waiting_does_not_count():
    line = Line(aging_s=10.0)
    low = line.add("low", priority=Priority.LOW)
    line.waiting.advance(6.0)
    line.serve()
    line.waiting.advance(50.0)
    line.waiting.add(low)
    line.waiting.advance(53.9)
    assert low.service_class is Priority.LOW
    line.waiting.advance(54.0)
    assert low.service_class is Priority.NORMAL


def test_a_line_of_many_does_not_keep_those_that_are_gone():
    line = Line()
    line.add("stays", tenant="a", time_left_s=500.0)
    for number in range(1000):
        line.add(f"a{number}", tenant="a", time_left_s=400 - number / 10)
        line.waiting.remove(line.sequences[f"a{number}"])
        line.waiting.first()
    assert line.serve() == "stays"
    assert len(line.waiting._lanes[Priority.NORMAL][1]._heap) == 0


def test_a_tenant_that_was_forgotten_while_its_request_ran_waits_with_one_account():
    line = Line()
    preempted = line.add("a0", tenant="a")
    line.waiting.remove(preempted)
    for number in range(3000):
        line.waiting.remove(line.add(f"x{number}", tenant=f"x{number}"))
        line.sequences[f"x{number}"].tenant.charge(1, 0)
    line.add("a1", tenant="a")
    line.waiting.add(preempted)
    assert preempted.tenant is line.sequences["a1"].tenant
    assert line.serve_all() == ["a0", "a1"]
