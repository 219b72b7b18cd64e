"""Where a user's files lie, also of one without a home."""

import os
from pathlib import Path

import pytest

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.user_folder import user_folder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The system's folder of temporary files."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)


def test_it_is_in_the_cache_of_a_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder() == tmp_path / ".cache" / "holdfast"
    assert user_folder().is_dir()


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_has_a_folder_that_nobody_else_reads(temporary):
    folder = user_folder()
    assert folder == temporary / f"holdfast-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert user_folder() == folder


def test_a_home_that_cannot_be_written_is_none(monkeypatch, temporary):
    (temporary / "file").touch()
    monkeypatch.setenv("HOME", str(temporary / "file"))
    assert user_folder() == temporary / f"holdfast-{os.getuid()}"


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("planted", ["a link", "open to all", "a file"])
def test_what_someone_else_may_have_put_there_is_not_used(temporary, planted):
    folder = temporary / f"holdfast-{os.getuid()}"
    if planted == "a link":
        (temporary / "theirs").mkdir()
        folder.symlink_to(temporary / "theirs")
    elif planted == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="set HOME"):
        user_folder()
