"""Spent weights: gives back the memory of a layout's linears while they are packed, so that weights are there once.

What may not live here: packing (`packing.py`).
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from torch import Tensor

from holdfast.worker.decoder.layout import DecoderLayout, Linear
from holdfast.worker.layers.mapped_files import MappedFiles, discard_contents, span


class SpentWeights:
    """The weights of a layout, each of which is read once."""

    def __init__(self, layout: DecoderLayout) -> None:
        self._files = MappedFiles()
        self._shared = _overlapping(layout)

    def read(self, weights: tuple[Tensor, ...], rows: slice) -> None:
        """These rows of each will not be read again.

        What lies in a file stays readable. Other memory is lost, unless another part of the layout lies there too.
        """
        for weight in weights:
            part = weight[rows]
            if not self._files.give_back(part) and weight.data_ptr() not in self._shared:
                discard_contents(part)


def linears(part: object) -> Iterator[Linear]:
    """All linears in a part of a layout."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from linears(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from linears(getattr(part, field.name))


def is_tied(layout: DecoderLayout) -> bool:
    """Whether the head's weights are the embedding's table: then it is kept packed, and once."""
    (head,) = layout.head.weights
    table = layout.embedding
    return (head.data_ptr(), head.shape, head.stride()) == (table.data_ptr(), table.shape, table.stride())


def _overlapping(layout: DecoderLayout) -> set[int]:
    """Addresses of weights whose memory is also that of another linear, or of the embedding."""
    spans = [] if is_tied(layout) else [(*span(layout.embedding), -1)]
    spans += [(*span(weight), number) for number, one in enumerate(linears(layout)) for weight in one.weights]
    shared: set[int] = set()
    reached, by = (0, 0), -2
    for start, end, number in sorted(spans):
        if start < reached[1] and number != by:
            shared |= {start, reached[0]}
        if end >= reached[1]:
            reached, by = (start, end), number
    return shared
