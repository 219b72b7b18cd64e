"""Loads of adapters on one rank: what is packed has the bytes of the digest that a request is bound to."""

import shutil
import threading
from functools import partial
from itertools import product

import pytest
import torch

from holdfast.worker.adapter import Adapter
from holdfast.worker.engine.adapters import AdapterGoneError, RankAdapters
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.tensor_parallel import SingleRank
from tests.parity.families import save_tiny_model
from tests.worker.executors.cpu.native import library_or_skip
from tests.worker.models.adapter_folders import PREFIX, places_of, save_adapter
from tests.worker.models.layouts import stated


class Loads(RankAdapters):
    """One rank with a tiny model, and waits for its loads."""

    def __init__(self, base, executor):
        places = places_of(base)
        super().__init__(lambda: self.executor, places, SingleRank())
        self.executor = executor

    def fetched(self, ticket, adapter):
        """The failure of a load."""
        done = threading.Event()
        self.fetch(ticket, adapter, done.set)
        assert done.wait(300)
        return self.take(ticket, ticket)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture
def loads(base):
    library_or_skip()
    executors = [
        CpuExecutor(stated(base, dtype="bfloat16"), SingleRank(), max_positions=64, threads=1) for _ in range(2)
    ]
    loads = Loads(base, executors[0])
    loads.other = executors[1]
    yield loads
    for executor in executors:
        executor.close()


def test_what_was_loaded_ahead_needs_the_folder_no_more(base, loads, tmp_path):
    folder, other = save_adapter(base, tmp_path / "a"), save_adapter(base, tmp_path / "b", seed=1)
    adapter = loads.load_ahead("a", str(folder))
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    assert loads.fetched(1, adapter) is None
    found = bytes(loads.executor._adapters[1].memory)
    assert isinstance(loads.fetched(2, adapter), AdapterGoneError), "it is taken once, and then read again"
    assert loads.fetched(3, loads.load_ahead("a", str(folder))) is None
    assert found != bytes(loads.executor._adapters[3].memory)
    assert bytes(loads.executor._adapters[3].memory) == loaded(loads, "b", other)


def loaded(loads, name, folder):
    """The packed matrices of an adapter that was not loaded ahead."""
    adapter = loads.load_ahead(name, str(folder))
    loads._ahead = None
    assert loads.fetched(9, adapter) is None
    return bytes(loads.executor._adapters[9].memory)


def test_files_that_have_not_changed_are_packed_once(base, loads, tmp_path):
    folder = save_adapter(base, tmp_path / "a")
    adapter = loads.load_ahead("a", str(folder))
    ahead = loads._ahead
    assert loads.load_ahead("a", str(folder)) == adapter
    assert loads._ahead is ahead
    assert loads.load_ahead("b", str(folder)).digest == adapter.digest
    assert loads._ahead is not ahead


def test_of_new_ones_one_waits_for_its_request_at_a_time(base, loads, tmp_path, monkeypatch):
    folder, other = save_adapter(base, tmp_path / "a"), save_adapter(base, tmp_path / "b", seed=1)
    now_s = 0.0
    monkeypatch.setattr("holdfast.worker.engine.adapters.time.monotonic", lambda: now_s)

    def is_loaded_ahead(name, folder, **given):
        adapter = loads.load_ahead(name, str(folder), **given)
        return loads._ahead.digest == adapter.digest

    assert is_loaded_ahead("a", folder, replaces=False)
    assert not is_loaded_ahead("b", other, replaces=False)
    assert loads.fetched(1, loads.load_ahead("a", str(folder), replaces=False)) is None
    assert is_loaded_ahead("b", other, replaces=False), "the other one was fetched"
    assert is_loaded_ahead("a", folder), "a replacement is loaded whatever waits"
    now_s = 2.0
    assert is_loaded_ahead("b", other, replaces=False), "no request came for the other one"


def test_what_was_loaded_for_other_weights_is_not_used(base, loads, tmp_path):
    folder = save_adapter(base, tmp_path / "a")
    adapter = loads.load_ahead("a", str(folder))
    loads.executor = loads.other
    shutil.rmtree(folder)
    assert isinstance(loads.fetched(1, adapter), ConfigurationError)


def test_faults_are_those_of_the_request(base, loads, tmp_path):
    wrong = save_adapter(base, tmp_path / "wrong", use_dora=True)
    assert "use_dora" in str(loads.fetched(1, loads.load_ahead("wrong", str(wrong))))
    stranger = save_adapter(base, tmp_path / "stranger", rank=4, change=other_model)
    assert "of another model" in str(loads.fetched(2, loads.load_ahead("stranger", str(stranger))))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        loads.load_ahead("gone", str(tmp_path / "nowhere"))


def test_a_number_that_is_none_is_refused_by_name(base, loads, tmp_path):
    """Also after an adapter of the same form."""
    assert loads.fetched(1, loads.load_ahead("a", str(save_adapter(base, tmp_path / "a")))) is None
    bits = {"nan": 0x7FC00000, "none": -1, "low": 0x7F800001, "inf": 0x7F800000}
    for number, (part, name) in enumerate(product("AB", bits)):
        folder = save_adapter(base, tmp_path / f"{part}-{name}", change=partial(spoil, part, bits[name]))
        given = loads.load_ahead(part, str(folder)) if number % 2 else Adapter.in_folder(part, str(folder))
        error = str(loads.fetched(2, given))
        assert f"layers.1.self_attn.q_proj.lora_{part}.weight has a NaN or an infinity" in error, name


def spoil(part, bits, config, tensors):
    tensors[f"{PREFIX}model.layers.1.self_attn.q_proj.lora_{part}.weight"].view(torch.int32)[3, 5] = bits


def test_matrices_are_packed_as_their_bytes_come(base, loads, tmp_path, monkeypatch):
    folder = save_adapter(base, tmp_path / "a")
    whole = loaded(loads, "a", folder)
    monkeypatch.setattr("holdfast.worker.models.adapter_content._PIECE", 1001)
    assert loaded(loads, "b", folder) == whole


def test_adapters_of_one_form_have_numbers_of_their_own(base, loads, tmp_path):
    """Their form is found out once, and memory is used again: each is packed as by a replica that has seen no other."""
    folders = [save_adapter(base, tmp_path / str(seed), seed=seed) for seed in range(4)]
    folders.append(save_adapter(base, tmp_path / "few", seed=9, targets=("q_proj", "v_proj"), rank=3))
    folders.append(save_adapter(base, tmp_path / "half", seed=5, change=halve))
    for number, folder in enumerate([*folders, *folders]):
        found = loads.load(Adapter.in_folder("a", str(folder)))
        fresh = Loads(base, loads.other).load(Adapter.in_folder("a", str(folder)))
        assert bytes(found.memory)[: found.num_bytes] == bytes(fresh.memory)[: fresh.num_bytes], number
        assert found.scales.tolist() == fresh.scales.tolist()
        loads.executor.put_adapter(1, found)


def halve(config, tensors):
    tensors.update({name: tensor.half() for name, tensor in tensors.items()})


def other_model(config, tensors):
    tensors.update({name: torch.ones(4, 8) for name in tensors if "lora_A" in name})
