"""Regression check of a benchmark: this checkout and another one in turns, and the ratio of each figure.

    python -m benchmarks.two_trees OTHER MODULE [--turns 5] [--only TEXT] [--json FILE] [-- OPTIONS]
    python -m benchmarks.two_trees ../before benchmarks.router -- --rounds 1 --seconds 1.2

OTHER is the folder of another checkout, with its native libraries built. The benchmark must write figures by `--json`
or `--out` in both. Pairs of runs alternate (this first, then the other first), so that both see the same company on the
machine, after a pair that is not counted; the ratio of a pair is this checkout's figure divided by the other's. A list
of numbers counts as its median.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.record import option_for_figures

_HERE: Final = Path(__file__).parents[1]
Figures = dict[str, float]
"""Of one run: the figure by its path in the file, as `models.S.cases.a.tokens_per_s`."""


def flat(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """(path, figure) of all numbers in what a benchmark wrote; text, truth values and empty lists are left out."""
    match value:
        case bool() | str() | None:
            return
        case int() | float():
            yield path, float(value)
        case list() if value and all(isinstance(one, int | float) for one in value):
            yield path, float(statistics.median(value))
        case dict():
            for name, inner in value.items():
                yield from flat(inner, f"{path}.{name}" if path else str(name))
        case list():
            for index, inner in enumerate(value):
                yield from flat(inner, f"{path}.{index}")


def run_once(tree: Path, module: str, options: list[str]) -> Figures:
    """Figures of one run in the checkout `tree`. Raises `CalledProcessError` where the benchmark fails."""
    option = option_for_figures(module)
    if option is None:
        raise ValueError(f"{module}: must have an option --json or --out, by which it writes figures")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "figures.json"
        command = [sys.executable, "-m", module, *options, option, str(out)]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        return dict(flat(json.loads(out.read_text())))


def in_turns(
    other: Path, module: str, options: list[str], turns: int, renamed: tuple[str, str] = ("", "")
) -> list[tuple[Figures, Figures]]:
    """(this checkout's figures, the other's) of each pair of runs. `renamed`: a word in the other's paths, and ours."""
    pairs = []
    for turn in range(turns + 1):
        order = (_HERE, other) if turn % 2 == 0 else (other, _HERE)
        by_tree = {tree: run_once(tree, module, options) for tree in order}
        theirs = {name.replace(*renamed): figure for name, figure in by_tree[other].items()}
        pairs.append((by_tree[_HERE], theirs))
        print(f"pair {turn} of {turns}" if turn else "warm", file=sys.stderr, flush=True)
    return pairs[1:]


def ratios(pairs: list[tuple[Figures, Figures]]) -> dict[str, list[float]]:
    """Ratio of each pair by the figure's path, of figures that all runs have and none has as 0."""
    common = set.intersection(*(set(one) for pair in pairs for one in pair))
    kept = [name for name in pairs[0][0] if name in common and all(one[name] for pair in pairs for one in pair)]
    return {name: [ours[name] / theirs[name] for ours, theirs in pairs] for name in kept}


def main() -> None:
    arguments = _arguments()
    renamed = tuple(arguments.renamed.split("="))
    pairs = in_turns(arguments.other, arguments.module, arguments.options, arguments.turns, renamed)
    found = {name: one for name, one in ratios(pairs).items() if arguments.only in name}
    if arguments.json:
        arguments.json.write_text(json.dumps({"pairs": pairs, "ratios": found}, indent=1))
    table = Table("figure", "this", "other", "ratio", "least..most")
    for name, each in found.items():
        ours, theirs = (statistics.median(pair[side][name] for pair in pairs) for side in (0, 1))
        spread = f"{min(each):.3f}..{max(each):.3f}"
        table.add_row(name, f"{ours:.4g}", f"{theirs:.4g}", f"{statistics.median(each):.3f}", spread)
    Console().print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="After --: options of the benchmark."
    )
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("module", help="as benchmarks.router")
    parser.add_argument("--turns", type=int, default=5, help="pairs of runs")
    parser.add_argument("--only", default="", help="shows figures whose path contains this")
    parser.add_argument("--renamed", default="=", metavar="THEIRS=OURS", help="a word in the paths of figures")
    parser.add_argument("--json", type=Path)
    words = sys.argv[1:]
    mark = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:mark])
    arguments.options = words[mark + 1 :]
    arguments.other = arguments.other.resolve()
    if not (arguments.other / "benchmarks").is_dir():
        parser.error(f"other: {arguments.other}: is no checkout: it has no folder benchmarks")
    if arguments.renamed.count("=") != 1:
        parser.error(f"renamed: {arguments.renamed}: must be THEIRS=OURS")
    if arguments.turns < 1:
        parser.error(f"turns: {arguments.turns}: must be at least 1")
    return arguments


if __name__ == "__main__":
    main()
