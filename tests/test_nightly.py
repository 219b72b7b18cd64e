"""The parts of the nightly run: together they are the whole, and none is done twice."""

from collections import Counter
from types import SimpleNamespace

import pytest

from scripts.nightly import NUM_SEEDS, commands, files_of, read_part
from tests import examples

PARTS = 6


def test_parts_have_each_file_once():
    files = Counter(file for part in range(1, PARTS + 1) for file in files_of(part, PARTS))
    assert files == Counter(files_of(1, 1))
    assert "tests/test_nightly.py" in files


def test_parts_have_each_seed_once_and_others_suites_once():
    parts = [commands(part, PARTS) for part in range(1, PARTS + 1)]
    seeds = [
        command[command.index("--seeds") + 1].split(":") for part in parts for command in part if "--seeds" in command
    ]
    assert [first for first, _ in seeds] == ["0", *(last for _, last in seeds[:-1])]
    assert seeds[-1][1] == str(NUM_SEEDS)
    (whole,) = [commands(1, 1)]
    for name in ("tests.router.schemas.corpus", "scripts.vllm_suite.run"):
        assert sum(name in command for part in parts for command in part) == 1
        assert sum(name in command for command in whole) == 1


def test_a_part_is_read_or_refused():
    assert read_part([]) == (1, 1)
    assert read_part(["3/6"]) == (3, 6)
    for wrong in ("0/6", "7/6", "3", "a/6", "3/"):
        with pytest.raises(ValueError, match="must be K/N"):
            read_part([wrong])


def test_of_crossed_parameters_the_run_of_every_day_has_each_value():
    """Three tests of six, and all of a test that does not say `in_turn`."""

    class Item(SimpleNamespace):
        def get_closest_marker(self, name: str) -> bool:
            return self.crossed and name == "in_turn"

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            left.append(self.nodeid)

    left: list[str] = []
    crossed = [("t", one, two) for one in "ab" for two in "xyz"]
    items = [
        Item(nodeid=f"{name}[{one}-{two}]", callspec=SimpleNamespace(_idlist=(one, two)), crossed=name == "t")
        for name, one, two in [*crossed, ("u", "a", "x"), ("u", "b", "x")]
    ]
    examples.leave_to_long_runs(items)  # type: ignore[arg-type]
    assert {item.nodeid for item in items} - set(left) == {"t[a-x]", "t[b-y]", "t[a-z]", "u[a-x]", "u[b-x]"}
