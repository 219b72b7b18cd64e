"""Messages of the leader to the other ranks that are no steps: signs of life, the order to stop, other weights.

Each begins with a number below 1; a step begins with its number of sequences, which is at least 1
(`worker/distributed/step_batch.py`). What may not live here: who sends and obeys them (`model_runner.py`).
"""

from enum import IntEnum

import numpy as np

from holdfast.worker.distributed.tensor_parallel import Message


class Order(IntEnum):
    """What a message begins with."""

    KEEP_ALIVE = 0
    STOP = -1
    RELOAD = -2
    """A folder's name and a version follow."""


def number_message(number: int) -> Message:
    """A message of one number."""
    return np.array([number], dtype=np.int64)


def reload_message(folder: str, version: str) -> Message:
    """The order to take the weights of a folder as a version."""
    return np.array([Order.RELOAD, *f"{folder}\0{version}".encode()], dtype=np.int64)


def read_reload(message: Message) -> tuple[str, str]:
    """The folder and the version of an order to reload."""
    folder, version = bytes(message[1:].tolist()).decode().split("\0")
    return folder, version
