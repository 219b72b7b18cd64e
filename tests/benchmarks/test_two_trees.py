"""Benchmarks of two checkouts in turns: what counts as a figure, the order of the runs, and the ratios."""

from pathlib import Path

import pytest

from benchmarks import two_trees

PROGRAM = """
import json, sys
order = open({order!r}, "a")
order.write({tree!r})
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps({{"a": {value}, "words": "none", "zero": 0}}))
"""


def test_figures_are_numbers_and_medians_of_lists():
    written = {"a": 1, "deep": {"list": [1.0, 5.0, 2.0], "rows": [{"x": 3}]}, "no": "text", "on": True, "none": []}
    assert dict(two_trees.flat(written)) == {"a": 1.0, "deep.list": 2.0, "deep.rows.0.x": 3.0}


@pytest.fixture
def checkouts(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """(other checkout, file with the order of the runs): the figure `a` is 3 here and 2 there."""
    order = tmp_path / "order"
    here, other = tmp_path / "here", tmp_path / "other"
    for tree, value in ((here, 3), (other, 2)):
        (tree / "benchmarks").mkdir(parents=True)
        program = PROGRAM.format(order=str(order), tree=f"{tree.name} ", value=value)
        (tree / "some_benchmark.py").write_text(program)
    monkeypatch.setattr(two_trees, "_HERE", here)
    monkeypatch.syspath_prepend(here)
    return other, order


def test_runs_alternate_and_a_ratio_is_of_one_pair(checkouts):
    other, order = checkouts
    pairs = two_trees.in_turns(other, "some_benchmark", [], turns=2)
    assert order.read_text().split() == ["here", "other", "other", "here", "here", "other"]  # the first are not counted
    assert two_trees.ratios(pairs) == {"a": [1.5, 1.5]}


def test_a_benchmark_without_figures_is_refused_by_name(checkouts):
    with pytest.raises(ValueError, match=r"benchmarks\.prefix_hits: must have an option --json or --out"):
        two_trees.run_once(checkouts[0], "benchmarks.prefix_hits", [])
