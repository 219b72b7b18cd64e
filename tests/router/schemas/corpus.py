"""JSON schemas of others, by the thousand: each is refused by its keyword, or every finished output is valid under it.

    python -m tests.router.schemas.corpus [FOLDER]

The schemas are those of JSON-Schema-Test-Suite (source distribution of `jsonschema`) and of `check-jsonschema`,
with each of their definitions by itself; they are fetched from the package index unless FOLDER has them. Others are
drawn by seeds. Outputs are seeded walks: no model is needed.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jsonschema

from holdfast.worker.errors import InvalidRequestError
from tests.router.schemas.drawn import drawn_schema
from tests.router.schemas.walks import Walker

SUITE, REAL = "jsonschema==4.26.0", "check-jsonschema==0.39.0"
_VALIDATORS: Final = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
_KEYWORDS: Final = frozenset().union(*(kind.VALIDATORS for kind in _VALIDATORS.values())) | {
    *("$schema", "$id", "then", "else", "minContains", "maxContains", "exclusiveMinimum", "exclusiveMaximum"),
    *("additionalItems", "items"),
}
_LARGEST: Final = 64 * 2**10
_NUM_WALKS: Final = 4
_NUM_DRAWN: Final = 2_000


class Case(NamedTuple):
    name: str
    schema: Any
    validator: Any
    values: tuple[Any, ...] = ()
    """Those that do not match must not be accepted."""


class Found(NamedTuple):
    verdict: str
    """`refused`, `valid`, `unfinished`, `unchecked` where the validator fails; others are faults."""
    detail: str = ""


def check(case: Case, walker: Walker) -> Found:
    try:
        grammar = walker.compile(json=json.dumps(case.schema))
    except InvalidRequestError as error:
        names = any(keyword in error.limit for keyword in keywords_of(case.schema))
        return Found("refused" if names or case.schema is False else "refused without a keyword", error.limit)
    validator, finished = case.validator(case.schema), 0
    for value in case.values:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if walker.accepts(grammar, text) and _is_invalid(validator, value):
            return Found("accepts what is invalid", text[:100])
    for seed in range(_NUM_WALKS):
        walk = walker.walk(grammar, seed)
        if walk.end == "length":
            continue
        if walk.end != "done":
            return Found("dead end", f"{walk.end} after {walk.text[:100]}")
        try:
            problem = next(validator.iter_errors(json.loads(walk.text)), None)
        except Exception as error:  # the validator's: references it does not find, recursion without end
            return Found("unchecked", repr(error)[:100])
        if problem is not None:
            return Found("invalid", f"{walk.text[:100]}: {problem.message[:100]}")
        finished += 1
    return Found("valid" if finished else "unfinished")


def _is_invalid(validator: Any, value: Any) -> bool:
    try:
        return not validator.is_valid(value)
    except Exception:  # as below
        return False


def keywords_of(schema: Any) -> set[str]:
    """The keywords of a schema and of those within it."""
    found, open_schemas = set[str](), [schema]
    while open_schemas:
        item = open_schemas.pop()
        if isinstance(item, Mapping):
            found |= item.keys() & _KEYWORDS
            open_schemas += item.values()
        elif isinstance(item, list):
            open_schemas += item
    return found


def suite(folder: Path) -> Iterator[Case]:
    """The schemas of JSON-Schema-Test-Suite."""
    for draft, validator in _VALIDATORS.items():
        for path in sorted((folder / draft).rglob("*.json")):
            for number, group in enumerate(json.loads(path.read_text(encoding="utf-8"))):
                name = f"{draft}/{path.stem}[{number}] {group['description']}"
                values = tuple(test["data"] for test in group["tests"])
                yield Case(name, group["schema"], validator, values)


def real(folder: Path) -> Iterator[Case]:
    """The schemas of files, and each of their definitions by itself."""
    for path in sorted(folder.rglob("*.json")):
        root = json.loads(path.read_text(encoding="utf-8"))
        validator = jsonschema.validators.validator_for(root, default=jsonschema.Draft7Validator)
        yield Case(path.stem, root, validator)
        for place in ("definitions", "$defs"):
            for name in root.get(place, {}):
                pointer = f"#/{place}/{name.replace('~', '~0').replace('/', '~1')}"
                schema = {"$ref": pointer, place: _reached(root, place, name)}
                yield Case(f"{path.stem}#{name}", schema, validator)


def drawn(seeds: range) -> Iterator[Case]:
    """Schemas drawn by seeds."""
    for seed in seeds:
        yield Case(f"seed {seed}", drawn_schema(seed), jsonschema.Draft202012Validator)


def _reached(root: Mapping[str, Any], place: str, name: str) -> dict[str, Any]:
    """The definitions that one of them needs."""
    found: dict[str, Any] = {}
    open_names = [name]
    while open_names:
        name = open_names.pop()
        if name in found or name not in root[place]:
            continue
        found[name] = root[place][name]
        text = json.dumps(found[name])
        open_names += [other for other in root[place] if f'"#/{place}/{other}' in text]
    return found


def fetch(folder: Path) -> tuple[Path, Path]:
    """The folders of both, unpacked below a folder."""
    tests, schemas = folder / "suite", folder / "real"
    if not tests.exists():
        with tarfile.open(_download(SUITE, folder, "--no-binary", "jsonschema")) as archive:
            archive.extractall(tests, filter="data")
    if not schemas.exists():
        with zipfile.ZipFile(_download(REAL, folder)) as archive:
            archive.extractall(schemas)
    return next(tests.glob("*/json/tests")), next(schemas.glob("*/builtin_schemas"))


def _download(package: str, folder: Path, *options: str) -> Path:
    before = set(folder.iterdir())
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        *options,
        "--dest",
        str(folder),
        package,
    ]
    subprocess.run(command, check=True)
    return next(path for path in folder.iterdir() if path not in before)


def run(folder: Path) -> int:
    """How many faults there are. Prints each, and counts."""
    tests, schemas = fetch(folder)
    walker, num_faults = Walker(), 0
    for title, cases in (("suite", suite(tests)), ("real", real(schemas)), ("drawn", drawn(range(_NUM_DRAWN)))):
        counts = Counter[str]()
        for case in cases:
            if len(json.dumps(case.schema)) > _LARGEST:
                continue
            verdict, detail = check(case, walker)
            counts[verdict] += 1
            if verdict not in ("refused", "valid", "unfinished", "unchecked"):
                num_faults += 1
                print(f"{verdict}: {case.name}: {detail}", flush=True)
        print(f"{title}: {sum(counts.values())} schemas: {dict(counts.most_common())}", flush=True)
    return num_faults


def main() -> int:
    if len(sys.argv) > 1:
        return min(run(Path(sys.argv[1])), 1)
    with tempfile.TemporaryDirectory() as folder:
        return min(run(Path(folder)), 1)


if __name__ == "__main__":
    sys.exit(main())
