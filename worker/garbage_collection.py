"""Python's garbage collector around imports and the loading of a model.

A full collection looks at every object: 100 ms with torch and transformers imported, in which no step runs. Nearly
all of these objects stay until the process ends. What may not live here: what is loaded.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Inside it nothing is collected: what modules make stays. Looking at it again and again takes a fifth of the CPU
    time of an import of torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def loading() -> Iterator[None]:
    """Inside it nothing is collected. What is there at its end is set aside, except garbage, which is freed."""
    with importing():
        yield
        gc.collect()
        set_aside()


def set_aside() -> None:
    """No collection looks at the present objects again. Those in no cycle are freed as ever."""
    gc.freeze()


def take_back() -> None:
    """Collections look at all objects again."""
    gc.unfreeze()
