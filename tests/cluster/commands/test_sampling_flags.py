"""Every sampling parameter can be said on the command line, and says there what it says in a script."""

from dataclasses import fields
from pathlib import Path

import pytest

from holdfast.cluster.commands import generate
from holdfast.cluster.commands.cli import run
from holdfast.cluster.commands.generate import Ask
from holdfast.cluster.commands.sampling_flags import SamplingFlags
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs

KINDS = {"json_schema", "json_object", "regex", "choice", "grammar"}
"""Flags that stand for the parameter `structured_outputs`."""

DEFAULTS = SamplingParams(temperature=0.0, seed=0, max_tokens=64)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """What `generate` would have completed."""
    asks: list[Ask] = []
    monkeypatch.setattr(generate, "_complete_here", lambda config, ask: asks.append(ask))
    return asks


def params_of(asked: list[Ask], *flags: str) -> SamplingParams:
    assert run(["generate", "hello", *flags]) == 0
    return asked.pop().params


def test_every_parameter_has_a_flag():
    flags = {field.name for field in fields(SamplingFlags)}
    assert flags - KINDS == {field.name for field in fields(SamplingParams)} - {"structured_outputs"}


def test_without_flags_a_completion_is_greedy_and_of_a_modest_length(asked):
    assert params_of(asked) == DEFAULTS
    assert SamplingFlags().params() == DEFAULTS


SAID = {
    "temperature": ["0.5"],
    "top_k": ["3"],
    "top_p": ["0.9"],
    "min_p": ["0.1"],
    "seed": ["7"],
    "repetition_penalty": ["1.5"],
    "presence_penalty": ["0.5"],
    "frequency_penalty": ["-0.5"],
    "logit_bias": ["42=-5", "7=0.5"],
    "allowed_token_ids": ["3", "4"],
    "bad_words": ["a", "b c"],
    "max_tokens": ["8"],
    "min_tokens": ["2"],
    "stop": ["x", "y"],
    "stop_token_ids": ["3", "4"],
    "n": ["2"],
    "best_of": ["3"],
    "logprobs": ["4"],
    "logprob_token_ids": ["3", "4"],
    "prompt_logprobs": ["5"],
    "truncate_prompt_tokens": ["-1"],
    "length_penalty": ["2.0"],
    "beam_width": ["4"],
}
ONLY_WITH = {"logprob_token_ids": {"logprobs": "0"}}
SWITCHES = {
    "--ignore-eos": {"ignore_eos": True},
    "--include-stop-str-in-output": {"include_stop_str_in_output": True},
    "--echo": {"echo": True},
    "--keep-special-tokens": {"skip_special_tokens": False},
    "--no-text": {"detokenize": False},
    "--truncate-right": {"truncate_right": True},
}


@pytest.mark.parametrize("name", SAID)
def test_a_flag_sets_its_parameter_and_no_other(name, asked):
    flags = [part for value in SAID[name] for part in (f"--{name.replace('_', '-')}", value)]
    others = ONLY_WITH.get(name, {})
    given = params_of(asked, *flags, *(part for other, value in others.items() for part in (f"--{other}", value)))
    changed = {field.name for field in fields(given) if getattr(given, field.name) != getattr(DEFAULTS, field.name)}
    assert changed == {name, *others}
    value = getattr(given, name)
    if isinstance(value, dict):
        assert value == {42: -5.0, 7: 0.5}
    else:
        assert list(map(str, value if isinstance(value, tuple) else [value])) == SAID[name]


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_turns_its_parameter(switch, asked):
    (name, value), *_ = SWITCHES[switch].items()
    assert getattr(params_of(asked, switch), name) is value


def test_every_parameter_is_tried_here():
    tried = SAID.keys() | {name for switch in SWITCHES.values() for name in switch}
    assert tried == {field.name for field in fields(SamplingParams)} - {"structured_outputs"}


def test_no_limit_on_tokens_can_be_said(asked):
    assert params_of(asked, "--max-tokens", "none").max_tokens is None


def test_a_shape_is_given_as_text_or_as_a_file(tmp_path: Path, asked, capsys):
    schema, grammar = '{"type": "object"}', "start: /a+/"
    (tmp_path / "schema.json").write_text(schema)
    (tmp_path / "grammar.lark").write_text(grammar)
    for flags, expected in (
        (["--json-schema", schema], {"json": schema}),
        (["--json-schema", str(tmp_path / "schema.json")], {"json": schema}),
        (["--grammar", grammar], {"grammar": grammar}),
        (["--grammar", str(tmp_path / "grammar.lark")], {"grammar": grammar}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--json-object"], {"json_object": True}),
        (["--choice", "hens", "--choice", "ducks"], {"choice": ("hens", "ducks")}),
    ):
        assert params_of(asked, *flags).structured_outputs == StructuredOutputs(**expected)
    for flag in ("--json-schema", "--grammar"):
        assert run(["generate", "hello", flag, "nowhere"]) == 2
        assert flag in capsys.readouterr().err


def test_a_priority_is_named(asked):
    assert run(["generate", "hello", "--priority", "critical"]) == 0
    assert asked.pop().service["priority"] is Priority.CRITICAL


def test_how_it_is_to_be_served_is_said_too(asked):
    flags = ["--tenant", "gold", "--timeout-s", "1.5", "--cache-salt", "x", "--cache-ttl-s", "60"]
    assert run(["generate", "hello", *flags]) == 0
    expected = {"priority": Priority.NORMAL, "tenant": "gold", "timeout_s": 1.5, "cache_salt": "x", "cache_ttl_s": 60}
    assert asked.pop().service == expected


def test_a_setting_whose_choices_have_none_takes_it(asked, capsys):
    assert run(["generate", "hello", "--speculative", "none"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--policy", "memory_aware"], ["--num-blocks", "9"], ["--config", "x.yaml"]])
def test_settings_of_a_server_are_not_for_a_request_to_say(flags, capsys):
    assert run(["generate", "hello", "--server", "127.0.0.1:1", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"holdfast: {flags[0]} (with --server): ")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--min-p", "2"], "sampling_params.min_p = 2.0: must be in [0, 1]"),
        (["--logit-bias", "x=1"], "--logit-bias 'x=1': must be TOKEN_ID=BIAS"),
        (["--logit-bias", "42"], "--logit-bias '42': must be TOKEN_ID=BIAS"),
        (["-n", "0"], "sampling_params.n = 0: must be at least 1"),
        (["--regex", "a", "--json-object"], "must have exactly one of"),
        (["--priority", "urgent"], "urgent"),
    ],
)
def test_a_wrong_value_is_one_clear_line(flags, expected, asked, capsys):
    assert run(["generate", "hello", *flags]) == 2
    stderr = capsys.readouterr().err
    assert expected in stderr
    assert len(stderr.splitlines()) == 1
    assert asked == []
