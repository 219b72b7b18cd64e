"""Contents of adapters' files that are read while others wait for them."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.worker.adapter import digest_of
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.spare_memory import SpareMemory
from holdfast.worker.models import adapter_content
from holdfast.worker.models.adapter_content import AdapterContent

CONFIG = b"{}"
BYTES = bytes(range(256)) * 40


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_content, "_PIECE", 1000)
    (file := tmp_path / "weights").write_bytes(BYTES)
    return file


@pytest.fixture
def beside():
    with ThreadPoolExecutor(1) as beside:
        yield beside


@pytest.fixture
def held(beside):
    """Work that holds up the thread of the digest until it is set."""
    held = threading.Event()
    beside.submit(held.wait)
    yield held
    held.set()


def content_of(file, beside):
    return AdapterContent("adapter a", file, CONFIG, SpareMemory(), beside)


def test_no_more_is_read_than_is_needed(file, beside, held):
    content = content_of(file, beside)
    assert [len(content.there(least)) for least in (1, 1000, 1001, 500)] == [1000, 1000, 2000, 2000]
    assert bytes(content.there(3000)) == BYTES[:3000]
    assert bytes(content.there(len(BYTES) + 1)) == bytes(content.whole) == BYTES
    held.set()
    assert content.digest == digest_of([CONFIG], [BYTES])


def test_the_digest_needs_nobody_else(file, beside):
    content = content_of(file, beside)
    assert content.digest == digest_of([CONFIG], [BYTES])
    assert bytes(content.whole) == BYTES


def test_many_readers(file, beside):
    content = content_of(file, beside)
    with ThreadPoolExecutor(4) as readers:
        found = list(readers.map(lambda least: bytes(content.there(least))[:least], range(0, len(BYTES), 100)))
    assert all(some == BYTES[: len(some)] for some in found)
    assert content.digest == digest_of([CONFIG], [BYTES])


def test_a_file_that_is_cut_short_meanwhile(file, beside, held):
    content = content_of(file, beside)
    content.there(1)
    os.truncate(file, 5000)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="adapter a: weights was cut short while it was read"):
            assert content.whole
    held.set()
    with pytest.raises(ConfigurationError, match="was cut short"):
        assert content.digest
    assert bytes(content.there(5000)) == BYTES[:5000]


def test_of_a_refused_one_nothing_more_is_read(file, beside, held):
    content = content_of(file, beside)
    content.there(1)
    content.refuse()
    held.set()
    beside.submit(int).result()
    assert content._num_there == 1000
    assert content_of(file, beside).digest == digest_of([CONFIG], [BYTES])
