"""Percentiles, throughput, goodput, the search for the highest load, and what is written of them."""

import json
import re

import numpy as np
import pytest

from holdfast.cluster.bench.display import paired, print_comparison, print_report
from holdfast.cluster.bench.report import (
    Distribution,
    Load,
    Machine,
    Report,
    Run,
    Search,
    Settings,
    Try,
    Turns,
    read_report,
)
from holdfast.cluster.bench.runs import LoadSearch
from holdfast.cluster.bench.summary import RequestRecord, Slo, distribution, percentile, summary
from holdfast.worker.errors import ConfigurationError


def record(due_s: float, ttft_s: float, gaps: int, gap_s: float, **fields) -> RequestRecord:
    pieces = [due_s + ttft_s + gap_s * index for index in range(gaps + 1)]
    made = RequestRecord(session=int(due_s), turn=0, due_s=due_s, sent_s=due_s + 0.004, end_s=pieces[-1] + 0.1)
    made.piece_s, made.num_output_tokens, made.num_prompt_tokens = pieces, gaps + 1, 10
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(count):
    values = np.random.default_rng(count).exponential(size=count)
    for share in (0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 1.0):
        assert percentile(sorted(values), share) == pytest.approx(np.quantile(values, share))
    found = distribution(values)
    assert (found.p50, found.p99, found.max) == pytest.approx(
        (np.median(values), np.quantile(values, 0.99), max(values))
    )


def test_a_run_is_summed_up_from_its_records():
    records = [record(0.0, 0.2, 4, 0.1), record(1.0, 0.6, 4, 0.1), record(2.0, 0.2, 4, 0.3)]
    failed = record(3.0, 0.1, 1, 0.1, error="HTTP 503", message="full", end_s=5.0)
    run = summary(
        Load(kind="open", rate=1.0, arrivals="constant"), [*records, failed], Slo.parsed("ttft=500ms,tpot=200ms")
    )
    assert (run.duration_s, run.requests, run.completed, run.failed) == (5.0, 4, 3, 1)
    assert run.errors == {"HTTP 503": 1}
    assert run.error_examples == {"HTTP 503": "full"}
    assert (run.output_tokens, run.prompt_tokens) == (15, 30)
    assert run.output_tokens_per_s == pytest.approx(3.0)
    assert run.total_tokens_per_s == pytest.approx(9.0)
    assert (run.good, run.goodput, run.attainment) == (1, pytest.approx(0.2), pytest.approx(0.25))
    assert run.ttft_s.mean == pytest.approx(1 / 3)
    assert run.itl_s.count == 12
    assert run.tpot_s.max == pytest.approx(0.3)
    assert run.e2e_s.max == pytest.approx(1.4)
    assert run.lateness_s.p50 == pytest.approx(0.004)


def test_the_time_line_adds_up_to_the_run():
    records = [record(0.1 * number, 0.5, 9, 0.1) for number in range(40)]
    run = summary(Load(kind="closed", concurrency=4), records, None)
    width_s = run.timeline[1].time_s
    assert sum(moment.output_tokens_per_s for moment in run.timeline) * width_s == pytest.approx(run.output_tokens)
    assert sum(moment.completed_per_s for moment in run.timeline) * width_s == pytest.approx(40)
    busy_s = sum(one.end_s - one.due_s for one in records)
    assert sum(moment.in_flight for moment in run.timeline) * width_s == pytest.approx(busy_s)


def test_an_open_loop_lasts_as_long_as_requests_could_have_come():
    assert summary(Load(kind="open", rate=1.0), [record(0.0, 0.1, 1, 0.1)], None, 10.0).requests_per_s == 0.1


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "ttft=0ms", "ttft=1s,ttft=2s", "speed=5ms", "ttft=1.2.3s"])
def test_an_slo_that_is_none_is_refused(text):
    with pytest.raises(ConfigurationError, match="--slo"):
        Slo.parsed(text)


def test_an_slo_is_met_by_all_of_its_limits():
    slo = Slo.parsed(" ttft=500ms, tpot=50ms,e2e=2s")
    assert slo.is_met(record(0.0, 0.5, 10, 0.05))
    assert slo.is_met(record(0.0, 0.5, 0, 0.0)), "there is no time per further token"
    assert not slo.is_met(record(0.0, 0.51, 10, 0.05))
    assert not slo.is_met(record(0.0, 0.5, 10, 0.051))
    assert not slo.is_met(record(0.0, 0.4, 40, 0.049))
    assert not slo.is_met(record(0.0, 0.1, 2, 0.01, error="timeout"))


# --- the search ---


def searched(limit: float, start: float, **options) -> tuple[float | None, list[float]]:
    search, tried = LoadSearch(start, **options), []
    while (load := search.next()) is not None:
        tried.append(load)
        search.note(load, is_fine=load <= limit)
    return search.best, tried


@pytest.mark.parametrize("limit", [0.1, 0.9, 1.0, 1.7, 6.3, 40.0, 55.5])
def test_the_search_comes_within_its_tolerance_of_the_limit(limit):
    best, tried = searched(limit, 1.0, max_tries=20)
    assert best <= limit <= best * 1.05 + 1e-9
    assert len(tried) == len(set(tried)) < 20


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 100])
def test_the_search_of_users_finds_the_whole_number_itself_where_it_is_small(limit):
    best, tried = searched(limit, 4, max_tries=20, is_whole=True)
    assert best <= limit <= best * 1.05
    assert all(load == int(load) >= 1 for load in tried)


def test_the_search_is_bounded():
    assert len(searched(1e9, 1.0, max_tries=5)[1]) == 5
    assert searched(0.0, 1.0, max_tries=50) == (None, [2.0**-power for power in range(7)])
    assert searched(0.0, 1.0, is_whole=True) == (None, [1.0])


def test_a_lucky_try_above_a_load_that_was_too_much_changes_nothing():
    search = LoadSearch(4.0)
    search.note(4.0, is_fine=False)
    search.note(8.0, is_fine=True)
    assert search.best is None
    assert search.next() == 2.0


# --- what is written ---


def report(*rates: float, slow: float = 1.0, **fields) -> Report:
    settings = {
        "server": "localhost:50051", "protocol": "holdfast", "model": "demo", "prompt_tokens": "128",
        "output_tokens": "5", "prefixes": 0, "prefix_tokens": 0, "turns": 1, "think_s": 0.0, "trace": None,
        "seed": 0, "text_seed": 1,
        "warmup": 0, "slo": "ttft=500ms", "attainment_wanted": 0.95, "tokens_per_word": 1.3,
    }  # fmt: skip
    runs = []
    for rate in rates:
        records = [record(number / rate, 0.1 * slow, 4, 0.02 * slow) for number in range(20)]
        records.append(record(20 / rate, 0.1, 1, 0.1, error="HTTP 503", message="<full> & closed"))
        runs.append(summary(Load(kind="open", rate=rate, arrivals="poisson"), records, Slo.parsed("ttft=500ms")))
    machine = Machine(cpus=2, load_average=0.5, python="3.11", holdfast="0.1.0")
    return Report(began_at="2026-01-01T00:00:00Z", machine=machine, settings=Settings(**settings), runs=runs, **fields)


def test_a_report_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "report.json"
    written = report(1.0, 2.0, search=Search(of="rate", best=2.0, tries=[Try(load=2.0, attainment=1.0, is_fine=True)]))
    written.write(path)
    assert read_report(path) == written


@pytest.mark.parametrize("change", [{"format": "other/1"}, {"runs": 3}, {"further": 1}])
def test_what_is_no_report_is_refused_with_its_name_and_place(tmp_path, change):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report(1.0).model_dump() | change))
    with pytest.raises(ConfigurationError, match=f"report.json.*{next(iter(change))}"):
        read_report(path)


def test_two_reports_are_compared_load_by_load(capsys):
    from rich.console import Console

    one, other = report(1.0, 2.0), report(2.0, 4.0, slow=2.0)
    ((left, right),) = paired(one, other)
    assert (left, right) == (one.runs[1], other.runs[0])
    print_comparison(Console(width=120), one, other, ("A", "B"))
    shown = capsys.readouterr().out
    assert re.search(r"TTFT p50, ms +100 +200 +2\.00", shown)


def test_reports_of_different_questions_say_so(capsys):
    from rich.console import Console

    one = report(1.0)
    other = one.model_copy(update={"settings": one.settings.model_copy(update={"output_tokens": "64"})})
    print_comparison(Console(width=120), one, other, ("A", "B"))
    assert "the settings differ: output_tokens is 5 in A, 64 in B" in capsys.readouterr().out


def test_a_terminal_is_told_what_failed_and_when_the_tool_itself_was_late(capsys):
    from rich.console import Console

    print_report(Console(width=120), report(1.0))
    shown = capsys.readouterr().out
    assert "1 x HTTP 503: <full> & closed" in shown
    assert "sent late" not in shown
    late = [record(0.0, 0.2, 4, 0.01, sent_s=0.1)]
    message = report(1.0).model_copy(update={"runs": [summary(Load(kind="closed", concurrency=1), late, None)]})
    print_report(Console(width=120), message)
    assert "sent late" in capsys.readouterr().out


def turn(session: int, index: int, num_prompt: int, num_cached: int | None, ttft_s: float, **fields) -> RequestRecord:
    return RequestRecord(
        session=session, turn=index, due_s=0.0, piece_s=[ttft_s], end_s=ttft_s, num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached, **fields,
    )  # fmt: skip


def test_turns_have_their_hit_rate_their_ttft_and_the_sessions_that_were_kept(capsys):
    from rich.console import Console

    records = [
        turn(0, 0, 100, None, 4.0), turn(0, 1, 110, 96, 0.5), turn(0, 2, 120, 99, 0.5),
        turn(1, 0, 100, 0, 4.0), turn(1, 1, 110, 80, 1.5), turn(1, 2, 500, 480, 9.0, error="timeout"),
    ]  # fmt: skip
    run = summary(Load(kind="agents", concurrency=2), records, None)
    found = run.turns
    assert (found.sessions, found.sessions_kept, found.cached_tokens) == (2, 1, 275)
    assert found.hit_rate == pytest.approx(275 / 540)
    assert found.seen_rate == pytest.approx(310 / 540)
    assert (found.first_ttft_s.p95, found.later_ttft_s.p50, found.later_ttft_s.max) == (4.0, 0.5, 1.5)
    one = report(1.0).model_copy(update={"runs": [run]})
    print_report(Console(width=120), one)
    print_comparison(Console(width=120), one, one, ("A", "B"))
    shown = capsys.readouterr().out
    assert "2 agents" in shown
    assert "50.9% of prompt tokens cached, 57.4% were of the turn before; 1 of 2 sessions" in shown
    assert re.search(r"TTFT of later turns p95, ms +1400 +1400 +1\.00", shown)


def test_what_a_turn_has_seen_before_is_at_most_its_prompt():
    turns = [turn(0, 0, 100, 0, 1.0, num_output_tokens=20), turn(0, 1, 140, 112, 1.0, num_output_tokens=50)]
    shorter = turn(0, 2, 160, 112, 1.0)
    run = summary(Load(kind="agents", concurrency=1), [*turns, shorter], None)
    assert run.turns.seen_rate == pytest.approx((120 + 160) / 400)


def test_a_server_that_tells_of_no_cache_has_no_hit_rate():
    run = summary(Load(kind="closed", concurrency=1), [turn(0, 0, 9, None, 1.0), turn(0, 1, 9, None, 1.0)], None)
    assert (run.turns.hit_rate, run.turns.cached_tokens, run.turns.sessions_kept) == (None, None, None)
    assert summary(Load(kind="closed", concurrency=1), [turn(0, 0, 9, 8, 1.0)], None).turns is None


def test_the_documented_schema_has_every_field_and_no_other():
    from pathlib import Path

    text = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
    for part in (Report, Settings, Machine, Run, Turns, Load, Distribution, Search, Try):
        section = text.split(f"### {part.__name__}\n")[1].split("\n#")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(part.model_fields), part.__name__
