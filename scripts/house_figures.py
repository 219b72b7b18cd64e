"""Figures of the code's shape: rooms, functions, import cycles, types with equal fields, files that know a parameter.

    python -m scripts.house_figures [--root DIR]     # DIR: another checkout, in an older layout too
    python -m scripts.house_figures --trace          # and what one warm request runs: offline, over gRPC, over HTTP

Counts only. Without `--trace` nothing is imported from the checkout that is looked at.
"""

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import median

PACKAGES = ("worker", "router", "cluster")
PARAMETERS = ("min_p", "repetition_penalty", "bad_words", "min_tokens", "prompt_logprobs")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file, and its name below the root."""

    path: Path
    name: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").replace("/", ".")


class House:
    """The sources of a checkout."""

    def __init__(self, root: Path) -> None:
        paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
        named = [Source(path, str(path.relative_to(root))) for path in paths if path.name != "__init__.py"]
        self.sources = [source for source in named if "/demo/" not in source.name or "train" not in source.name]

    def rooms(self) -> dict[str, list[Source]]:
        """Files by the folder that they lie in."""
        rooms: dict[str, list[Source]] = defaultdict(list)
        for source in self.sources:
            rooms[str(Path(source.name).parent)].append(source)
        return dict(rooms)

    def functions(self) -> list[tuple[int, str]]:
        """(lines, name) of every function, longest first."""
        found = []
        for source in self.sources:
            for node in ast.walk(source.tree):
                if isinstance(node, Function) and node.end_lineno is not None:
                    found.append((node.end_lineno - node.lineno + 1, f"{source.name}:{node.name}"))
        return sorted(found, reverse=True)

    def imports(self) -> dict[str, set[str]]:
        """What each module of Holdfast's imports of Holdfast's when it is loaded."""
        modules = {source.module for source in self.sources}
        graph: dict[str, set[str]] = {module: set() for module in modules}
        for source in self.sources:
            for node in source.tree.body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    origin = node.module.removeprefix("holdfast.")
                    names = {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
                    graph[source.module] |= names & modules
        return graph

    def records(self) -> dict[str, frozenset[str]]:
        """Fields of every dataclass and NamedTuple with at least three."""
        found = {}
        for source in self.sources:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef) and _is_record(node):
                    fields = frozenset(
                        item.target.id
                        for item in node.body
                        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                    )
                    if len(fields) >= 3:
                        found[f"{node.name} ({source.name})"] = fields
        return found

    def files_knowing(self, parameter: str) -> list[str]:
        """Files that name a sampling parameter, protos included, stubs not."""
        word = re.compile(rf"\b{parameter}\b")
        return [source.name for source in self.sources if word.search(source.text)]


def _is_record(node: ast.ClassDef) -> bool:
    marks = [*node.decorator_list, *node.bases]
    return any("dataclass" in ast.unparse(mark) or "NamedTuple" in ast.unparse(mark) for mark in marks)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """What is left of the modules once those that import none of the rest are taken away, again and again."""
    left = {module: set(imported) for module, imported in graph.items()}
    while loose := {m for m, imported in left.items() if not imported & left.keys()}:
        left = {module: imported - loose for module, imported in left.items() if module not in loose}
    return [sorted(left)] if left else []


def lookalikes(records: dict[str, frozenset[str]]) -> Iterator[tuple[str, str, int]]:
    """Pairs of types that share at least three fields, and two thirds of all that they have."""
    for (one, fields), (other, others) in combinations(sorted(records.items()), 2):
        shared = len(fields & others)
        if shared >= 3 and 3 * shared >= 2 * len(fields | others):
            yield one, other, shared


def report(house: House) -> None:
    for room, sources in house.rooms().items():
        print(f"{room:28} {len(sources):3} files {sum(source.num_lines for source in sources):6} lines")
    lengths = [length for length, _ in house.functions()]
    print(f"\n{len(house.sources)} files, {sum(source.num_lines for source in house.sources)} lines")
    print(f"longest file: {max((source.num_lines, source.name) for source in house.sources)}")
    small = [source for source in house.sources if source.num_lines < 50]
    print(f"files under 50 lines: {len(small)}")
    tenth = sorted(lengths)[int(0.9 * len(lengths))]
    print(f"functions: {len(lengths)}, median {median(lengths):.0f} lines, p90 {tenth}")
    print(f"longest functions: {house.functions()[:3]}")
    print(f"import cycles: {cycles(house.imports()) or 'none'}")
    pairs = list(lookalikes(house.records()))
    print(f"pairs of types with equal fields: {len(pairs)}")
    for one, other, shared in pairs:
        print(f"  {one} ~ {other}: {shared} fields")
    for parameter in PARAMETERS:
        files = house.files_knowing(parameter)
        print(f"files that know {parameter}: {len(files)}: {', '.join(files)}")


def report_traces() -> None:
    from scripts.request_trace import traces  # it loads all that serves

    for host, trace in traces().items():
        print(f"\none request, {host}: {len(trace.functions)} functions in {len(trace.files)} files")
        print(f"  returns to a room, on the way to the first step: {trace.returns()}")
        print("  " + ", ".join(f"{room} {count}" for room, count in sorted(trace.rooms.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of the code's shape.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="checkout to look at")
    parser.add_argument("--trace", action="store_true", help="also trace one warm request of 8 tokens on each host")
    options = parser.parse_args()
    report(House(options.root.resolve()))
    if options.trace:
        report_traces()


if __name__ == "__main__":
    main()
