from pathlib import Path

import pytest

from holdfast.worker.models.weight_files import checkpoint_digest


def checkpoint(folder: Path, weights: bytes = b"w" * 200_000, name: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(weights)
    return folder


def test_equal_copies_have_equal_digests(tmp_path):
    assert checkpoint_digest(checkpoint(tmp_path / "a")) == checkpoint_digest(checkpoint(tmp_path / "b"))


@pytest.mark.parametrize(
    "change",
    [
        {"weights": b"v" + b"w" * 199_999},
        {"weights": b"w" * 199_999 + b"v"},
        {"weights": b"w"},
        {"name": "x.safetensors"},
    ],
)
def test_other_weights_have_another(tmp_path, change):
    assert checkpoint_digest(checkpoint(tmp_path / "a")) != checkpoint_digest(checkpoint(tmp_path / "b", **change))


def test_the_configuration_counts(tmp_path):
    folder = checkpoint(tmp_path / "a")
    before = checkpoint_digest(folder)
    (folder / "config.json").write_text('{"rope_theta": 1}')
    assert checkpoint_digest(folder) != before
