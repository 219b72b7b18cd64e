"""Generator of the protobuf and gRPC stubs beside the .proto files, in place. `--check` only tells whether they are
current.

    python scripts/generate_stubs.py [--check]

The generator is pinned (`grpcio-tools` 1.78, gencode 6.33), so that the stubs run on protobuf 6.x and 7.x alike. The
protocols of others register in a descriptor pool of their own (`proto/holdfast/foreign/descriptor_pool.py`).
"""

import filecmp
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

PROTO = Path(__file__).resolve().parent.parent / "proto"
FOREIGN = PROTO / "holdfast" / "foreign"
PACKAGES = (PROTO / "holdfast" / "v1", FOREIGN)
DEFAULT_POOL = "from google.protobuf import descriptor_pool as _descriptor_pool\n"
OWN_POOL = "from holdfast.foreign import descriptor_pool as _descriptor_pool\n"


def generate(target: Path) -> None:
    """Writes the stubs of every .proto file below `target`."""
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(PROTO)) for package in PACKAGES for path in package.glob("*.proto"))
    includes = [f"-I{PROTO}", f"-I{files('grpc_tools') / '_proto'}"]
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", *includes, *outputs, *sources]) != 0:
        raise SystemExit("protoc failed")
    for path in (target / FOREIGN.relative_to(PROTO)).glob("*_pb2.py"):
        text = path.read_text()
        assert DEFAULT_POOL in text, f"{path.name} names its descriptor pool otherwise"
        path.write_text(text.replace(DEFAULT_POOL, OWN_POOL))


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        committed = {path: PROTO / path.relative_to(scratch) for path in sorted(Path(scratch).rglob("*_pb2*"))}
        stale = [path for path, place in committed.items() if not _same(path, place)]
        if "--check" in sys.argv:
            if stale:
                names = ", ".join(path.name for path in stale)
                raise SystemExit(f"stubs differ from their .proto files: {names}; run `make proto`")
            print(f"{len(committed)} stub files are current")
            return
        for path, place in committed.items():
            shutil.copy(path, place)
        print(f"{len(committed)} stub files written, {len(stale)} changed")


def _same(fresh: Path, committed: Path) -> bool:
    return committed.exists() and filecmp.cmp(fresh, committed, shallow=False)


if __name__ == "__main__":
    main()
