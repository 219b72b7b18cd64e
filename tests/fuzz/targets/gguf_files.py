"""GGUF files: the header, and what is made of it: a config, a tokenizer and the places of the tensors."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.worker.models.formats.gguf_folder import contents_of
from tests.fuzz.refusals import refused


@contextmanager
def opened() -> Iterator[Callable[[bytes], None]]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "model.gguf")

        def read(data: bytes) -> None:
            path.write_bytes(data)
            with refused():
                files = contents_of(path, "model")[1]
                assert {"config.json", "gguf.json"} <= files.keys()

        yield read
