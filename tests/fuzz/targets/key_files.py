"""API key files: what `holdfast serve --api-keys` reads, at the start and again when the file changes."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.router.security.api_keys import KeyRing, read_keys
from tests.fuzz.refusals import refused


@contextmanager
def opened() -> Iterator[Callable[[bytes], None]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.json"

        def read(data: bytes) -> None:
            path.write_bytes(data)
            with refused():
                ring = read_keys(path)
                again = KeyRing.read(ring.written(), "again")
                assert again.keys == ring.keys, "what is written is what was read"
                ring.find(data[:40].decode(errors="replace"))

        yield read
