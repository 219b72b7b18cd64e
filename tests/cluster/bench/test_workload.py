"""Arrivals, lengths, sessions and texts: what a load is, before anything is sent."""

import itertools
import random
import statistics

import pytest

from holdfast.cluster.bench.agents import AgentWorkload
from holdfast.cluster.bench.workload import Arrivals, Calibration, Lengths, PromptTexts, Session, Turn, Workload, traced
from holdfast.cluster.load_trace import read_trace
from holdfast.worker.errors import ConfigurationError


def times(count: int, seed: int = 0, **fields) -> list[float]:
    return list(itertools.islice(Arrivals(**fields).times(seed), count))


def gaps(moments: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise([0.0, *moments])]


@pytest.mark.parametrize(
    ("fields", "variation"),
    [
        ({"process": "poisson"}, 1.0),
        ({"process": "gamma", "burstiness": 0.25}, 2.0),
        ({"process": "gamma", "burstiness": 4.0}, 0.5),
        ({"process": "constant"}, 0.0),
    ],
)
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_process(fields, variation):
    found = gaps(times(6_000, rate=8.0, **fields))
    assert statistics.mean(found) == pytest.approx(1 / 8, rel=0.08)
    assert statistics.stdev(found) * 8 == pytest.approx(variation, rel=0.1, abs=1e-6)


def test_the_same_seed_gives_the_same_gaps_at_every_rate():
    slow, fast = times(50, rate=1.0), times(50, rate=4.0)
    assert fast == pytest.approx([time_s / 4 for time_s in slow])
    assert times(50, seed=1, rate=1.0) != slow


@pytest.mark.parametrize(
    "text", ["0", "-3", "x", "uniform:5", "uniform:9:3", "normal:1:2:3", "zipf:2", "inf", "nan", ""]
)
def test_lengths_that_are_none_are_refused_with_the_flag(text):
    with pytest.raises(ConfigurationError, match="--prompt-tokens"):
        Lengths.parsed("prompt-tokens", text)


@pytest.mark.parametrize(
    ("text", "low", "high", "median"),
    [
        ("128", 128, 128, 128),
        ("uniform:64:256", 64, 256, 160),
        ("normal:100:20", 1, 300, 100),
        ("lognormal:100:0.5", 1, 5000, 100),
        ("exponential:100", 1, 5000, 69),
    ],
)
def test_lengths_are_drawn_as_they_are_written(text, low, high, median):
    lengths = Lengths.parsed("prompt-tokens", text)
    rng = random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert min(drawn) >= low
    assert max(drawn) <= high
    assert statistics.median(drawn) == pytest.approx(median, rel=0.08)
    assert str(lengths) == text


def workload(**fields) -> Workload:
    fixed = {"prompt_tokens": Lengths("uniform", 8, 40), "output_tokens": Lengths("fixed", 4)}
    return Workload(**{**fixed, **fields})


def test_the_same_seed_gives_the_same_sessions_whichever_number_is_the_first():
    one, other = (list(itertools.islice(workload().sessions(first), 30)) for first in (0, 1000))
    assert [session.turns for session in one] == [session.turns for session in other]
    assert [session.number for session in other] == list(range(1000, 1030))
    assert [s.turns for s in itertools.islice(workload(seed=1).sessions(), 30)] != [s.turns for s in one]


def test_prefixes_are_shared_and_come_before_first_turns_alone():
    sessions = list(itertools.islice(workload(num_prefixes=3, prefix_tokens=16, num_turns=2).sessions(), 100))
    assert {session.turns[0].prefix for session in sessions} == {((one, 16),) for one in range(3)}
    assert not any(session.turns[1].prefix for session in sessions)
    texts = PromptTexts(0, Calibration())
    firsts = [texts.text(session, 0).split() for session in sessions]
    assert len({tuple(words[:16]) for words in firsts}) == 3
    assert len({tuple(words[:20]) for words in firsts}) == 100


def test_texts_have_the_words_that_the_calibration_asks_for_and_no_two_begin_alike():
    texts = PromptTexts(0, Calibration.of([(8, 8 * 2 + 5), (72, 72 * 2 + 5)]))
    sessions = [Session(number, (Turn(105, 1), Turn(40, 1))) for number in range(300)]
    first = [texts.text(session, 0).split() for session in sessions]
    assert {len(words) for words in first} == {50}
    assert {len(texts.text(session, 1).split()) for session in sessions} == {20}
    assert len({tuple(words[:3]) for words in first}) == 300
    assert texts.text(sessions[7], 0) == PromptTexts(0, texts.calibration).text(sessions[7], 0)
    assert texts.text(sessions[7], 0) != PromptTexts(1, texts.calibration).text(sessions[7], 0)


def test_prompts_longer_than_the_corpus_and_shorter_than_a_word_are_made():
    texts = PromptTexts(0, Calibration())
    assert len(texts.text(Session(0, (Turn(100_000, 1),)), 0).split()) == 100_000
    assert PromptTexts(0, Calibration(4.0, 100.0, True)).text(Session(0, (Turn(1, 1),)), 0)


def test_a_server_that_counts_nonsense_leaves_a_word_a_token():
    assert Calibration.of([(8, 10), (72, 10)]) == Calibration()


# --- published traces ---


def test_azures_trace_is_read_and_replayed_from_its_first_request_on(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,4808,10\n2023-11-16 18:15:50.9951690,3180,8\n"
    )
    one, other = traced(read_trace(path), speed=2.0)
    assert one == Session(0, (Turn(4808, 10),), 0.0)
    assert other.turns == (Turn(3180, 8),)
    assert other.start_s == pytest.approx((50.995169 - 46.68059) / 2, abs=1e-5)


def test_burstgpts_trace_is_read_without_the_requests_that_failed(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,Conversation log\n"
    )
    assert [(s.start_s, s.turns[0].num_output_tokens) for s in traced(read_trace(path))] == [(0.0, 18), (113.0, 276)]


def test_mooncakes_prefixes_are_shared_texts(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    line = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": [%s]}\n'
    path.write_text(line % (1000, 700, "3, 4") + line % (3000, 900, "3, 9"))
    texts = PromptTexts(0, Calibration())
    sessions = traced(read_trace(path))
    one, other = (texts.text(session, 0).split() for session in sessions)
    assert [session.start_s for session in sessions] == [0.0, 2.0]
    assert one[:512] == other[:512]
    assert one[512:] != other[512:700]
    assert (len(one), len(other)) == (700, 900)


@pytest.mark.parametrize("line", ["2023-99-16,5,5", "2023-11-16,,5", "2023-11-16,5,0", "2023-11-16,five,5", "NaN,5,5"])
def test_a_line_of_a_trace_that_cannot_be_is_named(tmp_path, line):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,5,5\n" + line + "\n")
    with pytest.raises(ConfigurationError, match=r"azure\.csv: request 2"):
        read_trace(path)


# --- agents ---


def agents(count: int, scale: float = 1.0, **fields) -> list[Session]:
    return list(itertools.islice(AgentWorkload.scaled(scale, **fields).sessions(), count))


def inputs_of(session: Session) -> list[int]:
    """Tokens of the prompt of each turn."""
    sizes = [turn.num_prompt_tokens + turn.num_output_tokens for turn in session.turns]
    return [
        total - turn.num_output_tokens for total, turn in zip(itertools.accumulate(sizes), session.turns, strict=True)
    ]


def test_agents_have_the_medians_of_the_trace():
    sessions = agents(400)
    turns = [turn for session in sessions for turn in session.turns]
    inputs = [tokens for session in sessions for tokens in inputs_of(session)]
    assert statistics.median(len(session.turns) for session in sessions) == pytest.approx(43, rel=0.05)
    assert statistics.median(inputs) == pytest.approx(142_000, rel=0.05)
    assert statistics.median(turn.num_output_tokens for turn in turns) == pytest.approx(444, rel=0.05)
    assert 1 - sum(turn.num_prompt_tokens for turn in turns) / sum(inputs) > 0.96
    pauses = [turn.pause_s for session in sessions for turn in session.turns[1:]]
    assert statistics.median(pauses) == pytest.approx(10, rel=0.05)
    assert statistics.quantiles(pauses, n=20)[-1] > 50


def test_agents_are_scaled_and_stay_within_the_scaled_window():
    sessions = agents(100, 0.03, pause_scale=0.5, num_turns=80)
    sizes = [sum(turn.num_prompt_tokens + turn.num_output_tokens for turn in one.turns) for one in sessions]
    assert 0.9 * 7680 < max(sizes) <= 7680
    assert statistics.median(one.turns[0].num_prompt_tokens for one in sessions) == pytest.approx(2700, rel=0.1)
    assert sessions == agents(100, 0.03, pause_scale=0.5, num_turns=80)
    assert sessions != agents(100, 0.03, pause_scale=0.5, num_turns=80, seed=1)


@pytest.mark.parametrize(("scale", "pauses", "name"), [(0, 1, "scale"), (1.5, 1, "scale"), (1, -1, "pauses")])
def test_a_factor_of_agents_that_is_none_is_refused(scale, pauses, name):
    with pytest.raises(ConfigurationError, match=f"--agent-{name}"):
        AgentWorkload.scaled(scale, pause_scale=pauses)
