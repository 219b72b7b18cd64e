"""Plants prompts that hold the event loop of whatever tokenizes them, in every Python process with this folder on its
path: they are planted when the tokenizer is imported, since Ray and `holdfast serve` import it by themselves.
"""

import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

SPINS: Final = "spins:"
"""A prompt that begins so never comes to an end."""

DRAGS: Final = "drags:"
"""A prompt that begins so takes `DRAG_S`."""

DRAG_S: Final = 1.2

_MODULE: Final = "holdfast.router.text.tokenizer"


def plant(tokenizer: Any) -> None:
    """Into the module `tokenizer`."""
    encode = tokenizer.Tokenizer.encode

    def planted(self: Any, text: str, *arguments: Any, **options: Any) -> Any:
        while text.startswith(SPINS):
            pass
        until = time.monotonic() + DRAG_S * text.startswith(DRAGS)
        while time.monotonic() < until:
            pass
        return encode(self, text, *arguments, **options)

    tokenizer.Tokenizer.encode = planted


class Planter(MetaPathFinder):
    """Finds that one module, as Python does, and changes it once it has been run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target) if name == _MODULE else None
        if found is not None and found.loader is not None:
            run = found.loader.exec_module

            def run_and_plant(module: ModuleType) -> None:
                run(module)
                plant(module)

            found.loader.exec_module = run_and_plant  # type: ignore[method-assign]
        return found


sys.meta_path.insert(0, Planter())
