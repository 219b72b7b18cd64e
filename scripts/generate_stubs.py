"""Generator of the protobuf and gRPC stubs of `proto/holdfast/v1`, in place. `--check` only tells whether they are
current.

    python scripts/generate_stubs.py [--check]

The generator is pinned (`grpcio-tools` 1.78, gencode 6.33), so that the stubs run on protobuf 6.x and 7.x alike.
"""

import filecmp
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

PROTO = Path(__file__).resolve().parent.parent / "proto"
PACKAGE = PROTO / "holdfast" / "v1"


def generate(target: Path) -> None:
    """Writes the stubs of every .proto file below `target`."""
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(PROTO)) for path in PACKAGE.glob("*.proto"))
    includes = [f"-I{PROTO}", f"-I{files('grpc_tools') / '_proto'}"]
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", *includes, *outputs, *sources]) != 0:
        raise SystemExit("protoc failed")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = sorted((Path(scratch) / PACKAGE.relative_to(PROTO)).iterdir())
        stale = [path for path in fresh if not _same(path, PACKAGE / path.name)]
        if "--check" in sys.argv:
            if stale:
                names = ", ".join(path.name for path in stale)
                raise SystemExit(f"stubs differ from their .proto files: {names}; run `make proto`")
            print(f"{len(fresh)} stub files are current")
            return
        for path in fresh:
            shutil.copy(path, PACKAGE / path.name)
        print(f"{len(fresh)} stub files written, {len(stale)} changed")


def _same(fresh: Path, committed: Path) -> bool:
    return committed.exists() and filecmp.cmp(fresh, committed, shallow=False)


if __name__ == "__main__":
    main()
