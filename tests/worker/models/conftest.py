from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def user_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders of GGUF files are made."""
    folder = tmp_path_factory.mktemp("user")
    monkeypatch.setattr("holdfast.worker.models.formats.gguf_folder.user_folder", lambda: folder)
    return folder
