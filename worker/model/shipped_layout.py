"""Shipped layout of a checkpoint: a layout file that comes with the package, so that even a first start does without
Hugging Face's modules.

`layouts/` has one for each share of the bundled models. A file's name says the checkpoint that it was made of, in two
digests: a quick one that most checkpoints fail, and one of all bytes. Its answers are Hugging Face's, so the executor
is proved at every load as ever. What may not live here: what a layout file holds (`worker/decoder/layout_file.py`), and
how these are made (`scripts/ship_layouts.py`).
"""

from hashlib import blake2b
from pathlib import Path
from typing import Final

from holdfast.worker.config import WorkerConfig
from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.model.checkpoint_digest import checkpoint_digest

SHIPPED: Final = Path(__file__).parent / "layouts"

_SETTINGS: Final = ("dtype", "max_model_len", "hf_overrides")
"""Of the model, that a shipped layout or its facts depend on: it was made with their defaults."""

_READ: Final = ("config.json", "generation_config.json")
"""Of a checkpoint, besides its weights."""


def find_shipped(config: WorkerConfig, folder: Path, group: TensorParallelGroup) -> Path | None:
    """The layout file for this rank's share of the checkpoint in `folder`, if there is one for these very bytes."""
    fields = type(config.model).model_fields
    if config.cache.block_size is not None or any(
        getattr(config.model, name) != fields[name].default for name in _SETTINGS
    ):
        return None
    share = f"{group.rank}-of-{group.size}"
    for path in SHIPPED.glob(f"{checkpoint_digest(folder)}-*-{share}"):
        if path.name == shipped_name(folder, group.rank, group.size):
            return path
    return None


def shipped_name(folder: Path, rank: int, size: int) -> str:
    """The name of the layout file for one share of a checkpoint. Reads all of it."""
    digest = blake2b(digest_size=16)
    for path in [*(folder / name for name in _READ), *sorted(folder.glob("*.safetensors"))]:
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return f"{checkpoint_digest(folder)}-{digest.hexdigest()}-{rank}-of-{size}"
