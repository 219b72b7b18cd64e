"""Configuration: files in YAML and TOML, environment variables, and flags of lists and mappings."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.cluster.config.config import load_config
from holdfast.worker.errors import ConfigurationError, HoldfastError
from tests.fuzz.refusals import MAX_TEXT

ENVIRONMENT = 2


@contextmanager
def opened() -> Iterator[Callable[[bytes], None]]:
    """The first byte says where the rest stands: 0 in YAML, 1 in TOML, 2 in variables, one a line."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "holdfast.yaml", Path(folder) / "holdfast.toml"]

        def read(data: bytes) -> None:
            where, content = data[:1], data[1:]
            number = where[0] % 3 if where else 0
            try:
                if number == ENVIRONMENT:
                    load_config(environ=variables(content))
                else:
                    paths[number].write_bytes(content)
                    load_config(file=paths[number], environ={})
            except ConfigurationError as error:
                lines = str(error).splitlines()
                assert all(len(line) <= MAX_TEXT for line in lines), f"a line of {max(map(len, lines))} characters"
            except HoldfastError as error:
                raise AssertionError("a configuration is refused as one") from error

        yield read


def variables(content: bytes) -> dict[str, str]:
    """`NAME=value` of each line, as an environment has it: text without NUL."""
    lines = content.replace(b"\0", b"").decode(errors="surrogateescape").split("\n")
    pairs = (line.partition("=") for line in lines)
    return {f"HOLDFAST_{name}": value for name, _, value in pairs if name}
