"""Generator of the layout files that come with the package (`worker/models/layouts`): starts each bundled model once.

    python -m scripts.ship_layouts

Run it when a bundled model, recognition or the form of layout files has changed, which
`tests/worker/models/test_shipped_layout.py` tells.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final
from unittest import mock

from holdfast.cluster.bundled_model.bundled_model import BUNDLED, BUNDLED_DRAFT, bundled_path
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.worker.models.kept_layout import SHIPPED, layouts_folder, shipped_name

SHARES: Final = ((BUNDLED, 1), (BUNDLED, 2), (BUNDLED_DRAFT, 1))
"""Model and ranks; a draft model is whole on its rank."""


def make(name: str, num_ranks: int) -> None:
    """Recognizes one model, and keeps the layout files of all its ranks."""
    folder = bundled_path(name)
    cache = Path.home() / ".cache" / "holdfast"
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, HOME=home):
        layouts_folder().parent.mkdir(parents=True)
        (layouts_folder().parent / "native").symlink_to(cache / "native")  # compiled already
        with InferenceEngine(str(folder), {"parallel": {"tensor_parallel_size": num_ranks}}):
            pass
        for path in layouts_folder().iterdir():
            rank = int(path.name.split("-")[1])
            made = SHIPPED / shipped_name(folder, rank, num_ranks)
            shutil.copyfile(path, made)
            print(made)


def main() -> None:
    SHIPPED.mkdir(exist_ok=True)
    for path in SHIPPED.iterdir():
        path.unlink()  # what is there would be used
    for name, num_ranks in SHARES:
        make(name, num_ranks)


if __name__ == "__main__":
    main()
