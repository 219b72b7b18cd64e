"""Adapter folders as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`.

Both files are read once, and their digest is computed from the same bytes that are applied.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from holdfast.worker.adapter import check_adapter_name, described, files_in, unreadable
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.adapters import LowRank, StoredMatrix
from holdfast.worker.executors.cpu.spare_memory import SpareMemory
from holdfast.worker.executors.finite import not_finite
from holdfast.worker.models.adapter_content import AdapterContent
from holdfast.worker.models.adapter_form import AdapterForm, form_of, refused
from holdfast.worker.models.safetensors_header import header_bytes, header_end

_MOST_FORMS: Final = 8  # that are kept

FormKey = tuple[bytes, bytes, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """The content of a folder."""

    given: str
    """Name and folder, for errors."""
    form: AdapterForm
    key: FormKey
    """Equal keys: equal forms."""
    content: AdapterContent
    """Content of the file with the matrices."""

    @property
    def modules(self) -> Mapping[str, LowRank]:
        """Matrices by the names of Hugging Face's modules."""
        return self.form.modules

    @property
    def digest(self) -> str:
        """Digest of both files. Waits for it."""
        return self.content.digest

    @property
    def has_effect(self) -> bool:
        """Whether any module adds anything but zeros."""
        content = self.content.whole
        return any(bool(one.a.of(content).any()) and bool(one.b.of(content).any()) for one in self.modules.values())

    def check_finite(self) -> None:
        """Refuses an adapter with a NaN or an infinity."""
        if (odd := _not_finite(self.form, self.content.whole)) is not None:
            raise ConfigurationError(f"{self.given}: {odd} has a NaN or an infinity")

    def refused(self, what: str) -> ConfigurationError:
        """Error that names the adapter and the model that it was made for."""
        return refused(self.given, self.form.base, what)

    def with_modules(
        self, modules: Mapping[str, LowRank], copies: Mapping[str, StoredMatrix], prefixes: tuple[str, str]
    ) -> "AdapterFolder":
        """The same with modules by the names that the model has for them, those of experts among them."""
        form = replace(self.form, modules=modules, stacks={}, copies=copies, prefixes=prefixes)
        return replace(self, form=form)


class AdapterReader:
    """Reads folders one after the other: a form is found out once, and memory is used again. Safe to call from any
    thread.
    """

    def __init__(self) -> None:
        self._forms: dict[FormKey, AdapterForm] = {}
        self._spare = SpareMemory()
        self._beside, self._pid = ThreadPoolExecutor(1, thread_name_prefix="adapter-beside"), os.getpid()

    def read(self, name: str, path: str) -> AdapterFolder:
        """Begins to read a folder, and checks its form.

        Raises `ConfigurationError` with the adapter's name and the fault.
        """
        check_adapter_name(name)
        given = described(name, path)
        config_file, weights_file = files_in(given, path)
        config = _read(given, config_file)
        if self._pid != os.getpid():  # a fork has none of its parent's threads
            self._beside, self._pid = ThreadPoolExecutor(1, thread_name_prefix="adapter-beside"), os.getpid()
        content = AdapterContent(given, weights_file, config, self._spare, self._beside)
        try:
            start = content.there(header_end(content.there(8)))
            key = config, header_bytes(start), len(content)
            form = self._form(key, given, weights_file, start)
        except ConfigurationError:
            content.refuse()
            raise
        return AdapterFolder(given=given, form=form, key=key, content=content)

    def _form(self, key: FormKey, given: str, path: Path, start: memoryview) -> AdapterForm:
        form = self._forms.get(key)
        if form is None:
            form = form_of(given, key[0], path, start, key[2])
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            self._forms[key] = form
        return form


def read_adapter(name: str, path: str) -> AdapterFolder:
    """Reads one folder as `AdapterReader.read` does."""
    return AdapterReader().read(name, path)


def _read(given: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(given, error) from error


def _not_finite(form: AdapterForm, content: memoryview) -> str | None:
    """Result of `not_finite` for all matrices; those of one type are looked at together."""
    if len(dtypes := {matrix.dtype for matrix in form.matrices.values()}) == 1:
        first = min(matrix.first for matrix in form.matrices.values())
        if first == len(content) or not_finite({"": torch.frombuffer(content[first:], dtype=dtypes.pop())}) is None:
            return None
    return not_finite({name: matrix.of(content) for name, matrix in form.matrices.items()})
