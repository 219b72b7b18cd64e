"""Figures of the code's shape: rooms, functions, import cycles, types with equal fields, files that know a parameter.

    python -m scripts.house_figures [--root DIR]     # DIR: another checkout, in an older layout too
    python -m scripts.house_figures --trace          # and what one warm request runs: offline, over gRPC, over HTTP

Counts only. Without `--trace` nothing is imported from the checkout that is looked at.

A function, class or method is public if its name has no leading underscore and another file of the product uses it. It
needs a docstring unless its body is one line, which says as much, or a base class or a Protocol documents the method.
A module-level number needs a unit in its name (`_S`, `_BYTES`, ...), or a comment or docstring with unit or source.
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
UNITS = re.compile(
    r"_(NS|US|MS|S|SECONDS|BYTES|KIB|MIB|GIB|BITS|HZ|TOKENS|ROWS|LANES|BLOCKS|TURNS|STEPS|LINES|DIGITS|WORDS|SHARE|FACTOR)$"
    r"|^_?(KIB|MIB|GIB)$|^_?(EXIT|NUM)_"
)
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

    def uses(self) -> dict[str, set[str]]:
        """Files that import each name or read it as an attribute."""
        uses: dict[str, set[str]] = defaultdict(set)
        for source in self.sources:
            for node in ast.walk(source.tree):
                match node:
                    case ast.ImportFrom(names=names):
                        for alias in names:
                            uses[alias.name].add(source.name)
                    case ast.Attribute(attr=name):
                        uses[name].add(source.name)
        return uses

    def classes(self) -> dict[str, list[ast.ClassDef]]:
        found: dict[str, list[ast.ClassDef]] = defaultdict(list)
        for source in self.sources:
            for node in source.tree.body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(node)
        return found

    def undocumented(self) -> list[str]:
        """Public functions, classes and methods without a docstring."""
        found, uses, classes = [], self.uses(), self.classes()
        protocols = {
            method for name in classes for one in classes[name] if _is_protocol(one) for method in _documented(one)
        }
        for source in self.sources:
            elsewhere = {name for name, files in uses.items() if files - {source.name}}
            for node in source.tree.body:
                if not isinstance(node, Function | ast.ClassDef) or node.name not in elsewhere:
                    continue
                lacking = [node.name] if _lacks_docstring(node) else []
                if isinstance(node, ast.ClassDef):
                    inherited = protocols | _inherited(node, classes)
                    lacking += [
                        f"{node.name}.{method.name}"
                        for method in node.body
                        if isinstance(method, Function)
                        and method.name in elsewhere - inherited
                        and _lacks_docstring(method)
                    ]
                found += [f"{source.name}:{name}" for name in lacking]
        return found

    def bare_numbers(self) -> list[str]:
        """Module-level numbers with neither a unit in their name nor a comment or docstring."""
        found = []
        for source in self.sources:
            lines, body = source.text.splitlines(), source.tree.body
            for node, following in zip(body, [*body[1:], ast.Pass()], strict=True):
                name = _number_named(node)
                if name is None or UNITS.search(name) or _is_text(following):
                    continue
                if not any("#" in line for line in lines[max(0, node.lineno - 2) : node.lineno]):
                    found.append(f"{source.name}:{name}")
        return found

    def files_knowing(self, parameter: str) -> list[str]:
        """Files that name a sampling parameter, protos included, stubs not."""
        word = re.compile(rf"\b{parameter}\b")
        return [source.name for source in self.sources if word.search(source.text)]


def _is_record(node: ast.ClassDef) -> bool:
    marks = [*node.decorator_list, *node.bases]
    return any("dataclass" in ast.unparse(mark) or "NamedTuple" in ast.unparse(mark) for mark in marks)


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)


def _documented(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, Function) and ast.get_docstring(item)}


def _inherited(node: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> set[str]:
    """Methods that a base class of Holdfast's documents."""
    bases = [base for name in map(ast.unparse, node.bases) for base in classes.get(name, []) if base is not node]
    return {name for base in bases for name in _documented(base) | _inherited(base, classes)}


def _lacks_docstring(node: Function | ast.ClassDef) -> bool:
    is_setter = any(ast.unparse(mark).endswith(".setter") for mark in node.decorator_list)
    if is_setter or node.name.startswith("_") or ast.get_docstring(node):
        return False
    first, last = node.body[0], node.body[-1]
    return isinstance(node, ast.ClassDef) or first.lineno != last.end_lineno or ast.unparse(first) == "..."


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _number_named(node: ast.stmt) -> str | None:
    """Name of a constant whose value is written in numbers, and of nothing else."""
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=value)
        ):
            numbers = [one.value for one in ast.walk(value or ast.Pass()) if isinstance(one, ast.Constant)]
            plain = bool(numbers) and all(type(number) in (int, float) for number in numbers)
            return (
                name
                if plain and name.isupper() and not any(isinstance(one, ast.Call) for one in ast.walk(node))
                else None
            )
    return None


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
    for title, found in (
        ("public functions without a docstring", house.undocumented()),
        ("numbers without unit or source", house.bare_numbers()),
    ):
        print(f"{title}: {len(found)}")
        for name in found:
            print(f"  {name}")
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
