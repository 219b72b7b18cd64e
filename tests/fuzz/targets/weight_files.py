"""Weight files: safetensors and their index, as the memory estimate, digest and loader read them."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from holdfast.worker.models.weight_files import checkpoint_digest, weight_bytes

INDEX, CONFIG = 1, 2


@contextmanager
def opened() -> Iterator[Callable[[bytes], None]]:
    """The first byte says what the rest is: 0 and above 2 a safetensors file, 1 an index, 2 a config.json."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights, index, config = (
            folder / part for part in ("model.safetensors", "model.safetensors.index.json", "config.json")
        )

        def read(data: bytes) -> None:
            what, content = data[:1], data[1:]
            number = what[0] if what else 0
            weights.write_bytes(b"")
            config.write_bytes(content if number == CONFIG else b"{}")
            index.unlink(missing_ok=True)
            if number == INDEX:
                index.write_bytes(content)
            elif number != CONFIG:
                weights.write_bytes(content)
            for dtype in ("auto", "bfloat16"):
                assert weight_bytes(folder, dtype) >= 0
            assert len(checkpoint_digest(folder)) == 12
            with suppress(SafetensorError), safe_open(weights, framework="pt") as file:
                for tensor in file.keys():  # noqa: SIM118  # it is no mapping
                    file.get_tensor(tensor)

        yield read
