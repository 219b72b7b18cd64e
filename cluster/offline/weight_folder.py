"""Weight folder: the folder that weights are read from, and one made of tensors that a caller has in memory.

Ranks are other processes, so tensors go to them as files.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from holdfast.worker.errors import ConfigurationError, InvalidRequestError
from holdfast.worker.models.formats.gguf_folder import hf_folder, is_made_of_gguf

if TYPE_CHECKING:
    from torch import Tensor

_NOT_WEIGHTS: Final = ("*.json", "*.model", "*.txt", "*.jinja")
_INDEX: Final = "*.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """A model's folder. A folder that was made from tensors is deleted with the object."""

    path: Path
    _made: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def of(cls, weights: "str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]", base: Self) -> Self:
        """The folder that `weights` names, or one with these tensors and all else of `base`.

        Raises `ConfigurationError` for a folder without a model, and `InvalidRequestError`, naming the tensor, for a
        tensor that `base` does not have, or that has another shape there.
        """
        if isinstance(weights, str | Path):
            folder = Path(weights).expanduser()
            if folder.exists():
                folder = hf_folder(folder, f"weights = {str(weights)!r}")
            if not (folder / "config.json").is_file():
                raise ConfigurationError(f"weights = {str(weights)!r}: there is no such folder with a config.json")
            return cls(folder)
        if is_made_of_gguf(base.path):
            raise ConfigurationError(
                "weights: the model is a GGUF file, whose tensors are replaced by a file as a whole"
            )
        made = tempfile.TemporaryDirectory(prefix="holdfast-weights-")
        _save(_checked(weights), base.path, Path(made.name))
        return cls(Path(made.name), made)


def _checked(weights: "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
    import torch

    try:
        given = dict(weights)
    except (TypeError, ValueError):
        raise InvalidRequestError("weights", weights, "must be a folder, or tensors by their names") from None
    for name, tensor in given.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidRequestError("weights", name, "must be the name of a tensor")
    return given


def _save(given: "dict[str, Tensor]", base: Path, folder: Path) -> None:
    """All tensors of `base`, with these tensors in their place, in the dtypes of `base`."""
    from safetensors.torch import save_file

    for pattern in _NOT_WEIGHTS:
        for path in base.glob(pattern):
            if not path.match(_INDEX):
                shutil.copy(path, folder)
    merged: dict[str, Tensor] = {}
    with ExitStack() as opened:
        for name, own in _tensors(base, opened):
            merged[name] = own() if name not in given else _fitting(name, given.pop(name), own())
        if given:
            raise InvalidRequestError("weights", sorted(given)[0], "is no tensor of the model's files")
        save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})


def _tensors(base: Path, opened: ExitStack) -> Iterator[tuple[str, Any]]:
    """Name and reader of each tensor in the files of a model."""
    from safetensors import safe_open

    for path in sorted(base.glob("*.safetensors")):
        file = opened.enter_context(safe_open(path, framework="pt"))
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            yield name, lambda file=file, name=name: file.get_tensor(name)


def _fitting(name: str, tensor: "Tensor", own: "Tensor") -> "Tensor":
    if tensor.shape != own.shape:
        raise InvalidRequestError("weights", f"{name} {tuple(tensor.shape)}", f"must have shape {tuple(own.shape)}")
    return tensor.detach().to(device="cpu", dtype=own.dtype).contiguous()
