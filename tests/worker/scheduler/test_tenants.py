"""Virtual token counters: what is charged, and who is lifted to where."""

from holdfast.worker.waiting_queue import TenantCounters


def test_an_output_token_costs_twice_a_prompt_token_and_a_share_divides_the_cost():
    counters = TenantCounters({"gold": 4.0})
    gold, plain = counters.of("gold"), counters.of("plain")
    for tenant in (gold, plain):
        tenant.charge(4, 2)
    assert (gold.counter, plain.counter) == (2.0, 8.0)


def test_one_who_becomes_active_is_lifted_to_the_smallest_of_the_active():
    counters = TenantCounters({})
    busy, busier, idle = (counters.of(name) for name in ("busy", "busier", "idle"))
    for tenant, num_tokens in ((busy, 10), (busier, 30)):
        counters.note_waiting(tenant)
        tenant.charge(num_tokens, 0)
    counters.note_waiting(idle)
    assert idle.counter == 10.0, "idling earns no credit"


def test_one_who_never_stopped_waiting_is_not_lifted():
    counters = TenantCounters({})
    patient, busy = counters.of("patient"), counters.of("busy")
    counters.note_waiting(patient)
    counters.note_waiting(busy)
    busy.charge(50, 0)
    counters.note_waiting(patient)
    assert patient.counter == 0.0


def test_service_beyond_ones_share_is_not_forgotten_by_going_away_and_coming_back():
    counters = TenantCounters({})
    greedy, other = counters.of("greedy"), counters.of("other")
    counters.note_waiting(other)
    counters.note_waiting(greedy)
    counters.note_gone(greedy)
    greedy.charge(100, 0)
    counters.note_waiting(counters.of("greedy"))
    assert greedy.counter == 100.0


def test_with_nobody_active_a_newcomer_is_lifted_to_the_last_who_was():
    counters = TenantCounters({})
    last, newcomer = counters.of("last"), counters.of("newcomer")
    counters.note_waiting(last)
    counters.note_gone(last)
    last.charge(0, 20)
    counters.note_waiting(newcomer)
    assert newcomer.counter == 40.0


def test_a_stream_of_new_names_does_not_pile_up_and_debts_are_kept():
    counters = TenantCounters({})
    waiting, debtor = counters.of("waiting"), counters.of("debtor")
    counters.note_waiting(waiting)
    debtor.charge(5, 0)
    for number in range(5000):
        counters.of(f"tenant-{number}")
    assert len(counters) <= 1024
    assert counters.of("waiting") is waiting
    assert counters.of("debtor") is debtor
