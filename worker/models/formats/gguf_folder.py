"""Folder of a GGUF model: the files of a Hugging Face folder, made from the GGUF file's metadata, with links to the
file.

It is made once for a file and kept among this user's, so that the vocabulary is converted once: config.json,
generation_config.json and the tokenizer's files, and where in the file each tensor lies. Numbers are read from the file
itself. Needs no torch.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.formats.gguf_block_names import Turn
from holdfast.worker.user_folder import user_folder

if TYPE_CHECKING:
    from holdfast.worker.models.formats.gguf_header import Header

SUFFIX: Final = ".gguf"
INDEX: Final = "gguf.json"
_MAX_FOLDERS: Final = 64
"""The oldest go when there are more."""

_OF_OTHERS: Final = "mmproj"
"""A file whose name begins so is the image encoder of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTensor:
    """A tensor, or a part of its rows, by its name in the Hugging Face model; see `NamedTensor` and `StoredTensor`."""

    name: str
    kind: str
    stored: tuple[int, ...]
    """Shape as it is stored."""
    file: str
    """The name of the link to its file in the folder."""
    offset: int
    num_bytes: int
    form: str
    rows: Turn | None
    columns: Turn | None
    first: int
    count: int
    plus: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its numbers: those of the tensor, but for parts, and forms that are no matrix."""
        return self.count, *self.stored[1:]


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file by its name."""
    return path.suffix.lower() == SUFFIX


def hf_folder(path: Path, given: str) -> Path:
    """The existing folder at a path, or the folder made from the GGUF file there: a file, one part of a split one, or a
    folder with just one of these and no safetensors. `given` says where the path was named.

    Raises `ConfigurationError` for a GGUF file that cannot be served.
    """
    file = _file_at(path, given)
    return path if file is None else _made_of(file, given)


def source_of(folder: Path) -> Path:
    """The GGUF file, or the first part of one, that a folder was made of; other folders as they are."""
    if not is_made_of_gguf(folder):
        return folder
    return gguf_files(folder)[0].resolve()


def read_index(folder: Path) -> list[IndexedTensor]:
    """The tensors of a folder that was made of a GGUF file."""
    content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return [_indexed(entry) for entry in content["tensors"]]


def _indexed(entry: dict[str, Any]) -> IndexedTensor:
    turns = {key: None if entry[key] is None else Turn(*entry[key]) for key in ("rows", "columns")}
    return IndexedTensor(**{**entry, **turns, "stored": tuple(entry["stored"])})


def is_made_of_gguf(folder: Path) -> bool:
    """Whether a folder was made of a GGUF file."""
    return (folder / INDEX).is_file()


def gguf_files(folder: Path) -> list[Path]:
    """The links to the files in a folder that was made of some; none in others."""
    return sorted(one for one in folder.iterdir() if is_gguf(one)) if is_made_of_gguf(folder) else []


def tokenizer_reason(folder: Path) -> str | None:
    """The reason why a folder made from a GGUF file has no tokenizer, if it has none."""
    path = folder / INDEX
    found = json.loads(path.read_text(encoding="utf-8")).get("no_tokenizer") if path.is_file() else None
    return None if found is None else str(found)


def _file_at(path: Path, given: str) -> Path | None:
    if path.is_file():
        if is_gguf(path):
            return path
        raise ConfigurationError(f"{given}: this is a file; give its folder, or a *.gguf")
    if not path.is_dir() or is_made_of_gguf(path) or any(path.glob("*.safetensors")):
        return None
    files = [file for file in sorted(path.iterdir()) if is_gguf(file) and not file.name.startswith(_OF_OTHERS)]
    if not files:
        return None
    from holdfast.worker.models.formats.gguf_header import parts_of

    if set(parts_of(files[0], given)) != set(files):
        names = ", ".join(file.name for file in files[:4]) + ", ..." * (len(files) > 4)
        raise ConfigurationError(f"{given}: the folder has {len(files)} GGUF files ({names}); name the one to serve")
    return files[0]


def _made_of(path: Path, given: str) -> Path:
    from holdfast.worker.models.formats.gguf_header import parts_of

    files = parts_of(path, given)
    folder = user_folder() / "gguf" / _digest(files)
    if not folder.is_dir():
        _make(folder, path, given)
        _drop_oldest(folder.parent)
    return folder


def _digest(files: tuple[Path, ...]) -> str:
    """Digest of the files as they are now, and of the code that makes the folder."""
    digest = blake2b(digest_size=12)
    for file in files:
        found = file.stat()
        state = str(file.resolve()), found.st_size, found.st_mtime_ns, found.st_ino
        digest.update(repr(state).encode())
    for package in ("gguf", "tokenizers"):
        with suppress(PackageNotFoundError):
            digest.update(version(package).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _make(folder: Path, path: Path, given: str) -> None:
    """Makes the folder, which appears as a whole."""
    sources, files = contents_of(path, given)
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            for name, content in files.items():
                (made / name).write_text(content, encoding="utf-8")
            for file in sources:
                (made / file.name).symlink_to(file.resolve())
            with suppress(OSError):  # another process was first
                made.rename(folder)
    except OSError as error:
        raise ConfigurationError(f"{given}: {folder.parent} cannot be written to ({error.strerror})") from error


def contents_of(path: Path, given: str) -> tuple[tuple[Path, ...], Mapping[str, str]]:
    """The files that are read, and those of the folder that is made of them, by name.

    Raises `ConfigurationError` for a file that cannot be served.
    """
    from holdfast.worker.models.formats.gguf_header import read_header, refused
    from holdfast.worker.models.formats.gguf_metadata import NotUnderstood

    header = read_header(path, given)
    try:
        return header.files, _contents(header)
    except NotUnderstood as reason:
        raise refused(given, header.files[0], str(reason)) from reason


def _contents(header: "Header") -> Mapping[str, str]:
    """The files of the folder by name. Raises `NotUnderstood`."""
    from holdfast.worker.models.formats.gguf_architectures import hf_config, hf_tensors
    from holdfast.worker.models.formats.gguf_metadata import NotUnderstood
    from holdfast.worker.models.formats.gguf_tokenizer import GgufTokenizer

    config = hf_config(header)
    tensors = [
        IndexedTensor(
            name=named.name,
            kind=named.stored.kind,
            stored=named.stored.shape,
            file=header.files[named.stored.part].name,
            offset=named.stored.offset,
            num_bytes=named.stored.num_bytes,
            form=named.form,
            rows=named.rows,
            columns=named.columns,
            first=named.first,
            count=named.stored.shape[0] - named.first if named.count is None else named.count,
            plus=named.plus,
        )
        for named in hf_tensors(header, config)
    ]
    index: dict[str, Any] = {"tensors": [asdict(tensor) for tensor in tensors]}
    files: dict[str, Any] = {"config.json": config}
    texts: dict[str, str] = {}
    try:
        tokenizer = GgufTokenizer(header.metadata, str(header.metadata["general.architecture"]))
        files |= tokenizer.files()
        texts["tokenizer.json"] = tokenizer.tokenizer.to_str()
    except NotUnderstood as reason:
        index["no_tokenizer"] = str(reason)
    files[INDEX] = index
    return {**{name: json.dumps(content) for name, content in files.items()}, **texts}


def _drop_oldest(folder: Path) -> None:
    for one in sorted(folder.iterdir(), key=_changed_ns)[:-_MAX_FOLDERS]:
        shutil.rmtree(one, ignore_errors=True)


def _changed_ns(folder: Path) -> int:
    """0 for one that another process has dropped meanwhile."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
