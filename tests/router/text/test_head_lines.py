"""Lines that change with each call are dropped or moved by the rules that hold, and noted by those that do not."""

import pytest

from holdfast.router.chat import CacheMark, Chat
from holdfast.router.text.head_lines import tidied

ALL = ("billing", "date", "time", "id")
BILLING = "x-anthropic-billing-header: cc_version=2.1.15.f3a; cc_entrypoint=cli; cch=a1b2c;"
BODY = "You are a coding agent.\nWork in small steps."

LINES = {
    "a billing header without a line break": (BILLING, "billing"),
    "a billing header on a line": (f"{BILLING}\n", "billing"),
    "a date": ("Today's date: 2026-11-28\n", "date"),
    "a date in words": ("The current date is Saturday, 28 November 2026.\n", "date"),
    "a time": ("Current time: 18:24:03 UTC\n", "time"),
    "date and time": ("The current date and time is 2026-11-28 18:24.\n", "time"),
    "an id": ("Session ID: 5f1c-77aa\n", "id"),
}

HARMLESS = (
    BODY,
    "Date formats are ISO 8601.\n",
    "It is time to work.\n",
    "Timeouts: 30 s\n",
    "x-anthropic-billing-header is sent by some clients.\n",
    "Write the id: of each row\n",
)


def chat(system, *more, **fields):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Begin."}, *more]
    return Chat(messages=messages, **fields)


@pytest.mark.parametrize(("line", "rule"), LINES.values(), ids=LINES.keys())
def test_a_line_is_moved_by_its_rule_and_noted_without_it(line, rule):
    given = chat(line + BODY)
    left, noted = tidied(given, [name for name in ALL if name != rule])
    assert left is given
    assert [one.rule for one in noted] == [rule]
    made, noted = tidied(given, [rule])
    assert (made.messages[0]["content"], noted) == (BODY, ())
    asked = made.messages[-1]["content"]
    assert asked == ("Begin." if rule == "billing" else f"Begin.\n\n{line.strip()}")
    assert tidied(made, ALL) == (made, ())


@pytest.mark.parametrize("text", HARMLESS)
def test_what_does_not_change_stays(text):
    given = chat(text + BODY)
    assert tidied(given, ALL) == (given, ())


def test_two_calls_that_differ_in_such_lines_have_one_prefix():
    heads = [f"{BILLING[:-3]}{number};You help.\nToday is 2026-11-{number}\nBe brief." for number in (27, 28)]
    first, second = (tidied(chat(head), ALL)[0].messages for head in heads)
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_a_line_in_a_users_words_or_without_a_system_prompt_stays():
    given = Chat(messages=[{"role": "user", "content": f"{BILLING}\nToday is 2026-11-28"}])
    assert tidied(given, ALL) == (given, ())


def test_what_moves_goes_behind_the_last_users_message_in_parts_too():
    parts = [{"type": "text", "text": "Go on."}]
    answer = {"role": "assistant", "content": "Yes?"}
    made, _ = tidied(chat("Today is 2026-11-28\nx", answer, {"role": "user", "content": parts}), ALL)
    assert made.messages[1]["content"] == "Begin."
    assert made.messages[3]["content"] == [*parts, {"type": "text", "text": "\n\nToday is 2026-11-28"}]


def test_marks_stay_where_they_were():
    system = f"{BILLING}\n{BODY}"
    marks = (CacheMark(0, len(system), 300), CacheMark(0, 3, 300), CacheMark(1, 6, 300))
    made, _ = tidied(chat(system, marks=marks), ALL)
    assert made.marks == (CacheMark(0, len(BODY), 300), CacheMark(0, 0, 300), CacheMark(1, 6, 300))
