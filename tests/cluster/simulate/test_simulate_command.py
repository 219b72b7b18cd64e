"""`holdfast simulate` on seeds: the summary, what a failure prints, and its replay."""

import re

import pytest

from holdfast.cluster.commands.cli import run
from tests.cluster.simulate import planted_in_replicas


def test_a_campaign_says_what_it_went_through_and_several_cores_go_through_the_same(capsys):
    assert run(["simulate", "--seeds", "71:73"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"requests +[1-9]\d* \([\d,]+ a minute\)", printed)
    assert re.search(r"promises broken +0", printed)
    run(["simulate", "--seeds", "71:73", "--jobs", "2"])
    tokens = r"tokens +.* steps"
    assert re.search(tokens, capsys.readouterr().out).group() == re.search(tokens, printed).group()


def test_a_failing_seed_prints_a_command_that_replays_it(monkeypatch, capsys):
    planted_in_replicas.restart_the_noise(monkeypatch)
    assert run(["simulate", "--seeds", "72:200"]) == 1
    printed = capsys.readouterr().out
    (failure,) = re.findall(r"^seed .*$", printed, re.MULTILINE)
    (command,) = re.findall(r"holdfast (simulate --replay \d+)", printed)
    assert run([*command.split(), "--last", "5"]) == 1
    *events, again = capsys.readouterr().out.splitlines()
    assert again == failure
    assert len(events) == 5
    assert f"event {events[-1].split()[0]}," in failure


def test_a_replay_without_a_failure_says_so(capsys):
    assert run(["simulate", "--replay", "14", "--last", "3"]) == 0
    assert "every promise was kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--jobs", "-1"],
        ["--max-failures", "0"],
        ["--last", "-1", "--replay", "8"],
        ["--max-num-seqs", "0", "--replicas", "2"],
        ["--max-num-batched-tokens", "0", "--replicas", "2"],
        ["--num-blocks", "0", "--replicas", "2"],
        ["--max-model-len", "1", "--replicas", "2"],
    ],
)
def test_a_number_that_makes_no_sense_is_refused_by_the_name_of_its_flag(flags, capsys):
    assert run(["simulate", *flags]) == 2
    assert f"{flags[0]} {flags[1]}: must" in capsys.readouterr().err


def test_two_plans_in_flight_are_for_simulations_under_faults(capsys, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text('{"base_s": 0.01, "decode_s": 0.0, "token_s": 0.0, "context_token_s": 0.0}')
    assert run(["simulate", "--replicas", "2", "--step-model", str(costs), "--async-scheduling"]) == 2
    assert "--async-scheduling with --replicas: must not be" in capsys.readouterr().err
    assert run(["simulate", "--replay", "14", "--last", "1", "--async-scheduling"]) == 0
    assert "every promise was kept" in capsys.readouterr().out


@pytest.mark.parametrize("seeds", ["7", "5:5", "a:b"])
def test_seeds_that_are_no_range_are_refused(seeds, capsys):
    assert run(["simulate", "--seeds", seeds]) == 2
    assert "--seeds" in capsys.readouterr().err
