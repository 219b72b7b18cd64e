"""Packed weights of equal models are in memory once, cannot be changed, and go with the last process that has them."""

import ctypes
import fcntl
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from holdfast.worker.executors.cpu import shared_weights
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.cpu.library import class_of
from holdfast.worker.executors.cpu.packing import PackedModel
from holdfast.worker.executors.cpu.shared_weights import SharedArena, arena_for, find_file, layout_digest
from holdfast.worker.executors.cpu.tile_memory import Arena
from holdfast.worker.executors.layout import DecoderLayout
from tests.worker.executors.cpu.native import library_or_skip
from tests.worker.executors.models import config_of, layout_of

LIMIT_S = 60.0
SEEDS = itertools.count(os.getpid() * 1000)
"""Every test has weights of its own: those of equal ones would be shared with it."""


@pytest.fixture
def layout(monkeypatch) -> DecoderLayout:
    monkeypatch.setattr(shared_weights, "shares_large_pages", lambda: True)
    torch.manual_seed(next(SEEDS))
    return layout_of(config_of("llama", hidden_size=64, intermediate_size=256))


def packed(layout: DecoderLayout, arena: Arena) -> PackedModel:
    library = library_or_skip()
    pool = library.native_pool_create(1, -1, None)
    try:
        return PackedModel(layout, library, pool, max_positions=64, arena=arena)
    finally:
        library.native_pool_destroy(pool)


def shared(layout: DecoderLayout) -> PackedModel:
    return packed(layout, arena_for(layout, class_of(library_or_skip())))


def name_of(layout: DecoderLayout) -> str:
    return shared_weights._PREFIX + layout_digest(layout, class_of(library_or_skip()))


def tiles(model: PackedModel) -> list[bytes]:
    """All packed linears of a model."""
    linears = [model.model.head]
    linears += [one for layer in model.layers for one in (layer.qkv, layer.output, layer.mlp.up, layer.mlp.down)]
    sizes = [one.groups * 64 * one.slices * one.slice_tiles * 32 * model._itemsize for one in linears]
    return [ctypes.string_at(one.tiles, size) for one, size in zip(linears, sizes, strict=True)]


def test_the_second_has_the_memory_of_the_first_and_the_bits_of_one_alone(layout):
    first, second, alone = shared(layout), shared(layout), packed(layout, Arena())
    assert isinstance(first._arena, SharedArena)
    assert isinstance(second._arena, SharedArena)
    assert (first._arena.is_packed, second._arena.is_packed) == (False, True)
    assert os.fstat(first._arena._file).st_ino == os.fstat(second._arena._file).st_ino
    assert tiles(first) == tiles(second) == tiles(alone)


def test_it_goes_with_the_last_who_has_it(layout):
    name = name_of(layout)
    first, second = shared(layout), shared(layout)
    before = tiles(first)
    del first
    gc.collect()
    assert tiles(second) == before
    file = find_file(name)
    assert file is not None
    os.close(file)
    del second
    gc.collect()
    assert find_file(name) is None


def test_nobody_can_change_it(layout):
    model = shared(layout)
    assert isinstance(model._arena, SharedArena)
    assert fcntl.fcntl(model._arena._file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    with open(f"/proc/self/fd/{model._arena._file}", "r+b", buffering=0) as file, pytest.raises(PermissionError):
        file.write(b"x")


@pytest.mark.parametrize("part", ["weight", "slices", "scaling"])
def test_other_weights_or_another_order_of_adding_have_another_name(layout, part):
    layer = layout.layers[0]
    other = layout
    if part == "weight":
        weight = layer.mlp.down.weights[0].clone()
        weight.view(-1)[-1] += 1.0
        down = replace(layer.mlp.down, weights=(weight,))
        other = replace(layout, layers=(replace(layer, mlp=replace(layer.mlp, down=down)), *layout.layers[1:]))
    elif part == "slices":
        other = replace(layout, layers=(replace(layer, mlp=replace(layer.mlp, num_slices=2)), *layout.layers[1:]))
    else:
        other = replace(layout, embedding_scale=2.0)
    assert name_of(other) != name_of(layout)
    assert name_of(replace(layout)) == name_of(layout)


def test_a_file_counts_by_its_state(layout, tmp_path):
    """Equal bytes at another time may not be: whoever has written there may have written anything."""
    path = tmp_path / "weights"
    path.write_bytes(layout.embedding.contiguous().view(torch.uint8).numpy().tobytes())

    def with_table() -> str:
        table = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        return name_of(replace(layout, embedding=table.view(layout.embedding.dtype).view(layout.embedding.shape)))

    before = with_table()
    assert with_table() == before
    os.utime(path, (1, 1))
    assert with_table() != before


def test_one_packs_and_the_other_waits_for_it(layout):
    """What is not whole yet is nobody else's."""
    name = name_of(layout)
    first = arena_for(layout, class_of(library_or_skip()))
    assert find_file(name) is None
    found: list[PackedModel] = []
    second = threading.Thread(target=lambda: found.append(shared(layout)), daemon=True)
    second.start()
    model = packed(layout, first)
    second.join(LIMIT_S)
    assert isinstance(found[0]._arena, SharedArena)
    assert found[0]._arena.is_packed
    assert tiles(found[0]) == tiles(model)


def test_who_has_waited_too_long_packs_its_own(layout, monkeypatch):
    monkeypatch.setattr(shared_weights, "WAIT_S", 0.0)
    first = arena_for(layout, class_of(library_or_skip()))
    assert isinstance(first, SharedArena)
    assert type(arena_for(layout, class_of(library_or_skip()))) is Arena


_KILLED = """
import sys, time
from holdfast.worker.executors.cpu import shared_weights
shared_weights._take_turn(sys.argv[1])
file = shared_weights.os.memfd_create(sys.argv[1], shared_weights.os.MFD_ALLOW_SEALING)
shared_weights.os.ftruncate(file, 1 << 21)
print("packing", flush=True)
time.sleep(600)
"""


def test_a_process_that_is_killed_while_it_packs_holds_nobody_up(layout):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _KILLED, name_of(layout)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"packing\n"
        found: list[PackedModel] = []
        waiting = threading.Thread(target=lambda: found.append(shared(layout)), daemon=True)
        waiting.start()
        other.send_signal(signal.SIGKILL)
        waiting.join(LIMIT_S)
    assert tiles(found[0]) == tiles(packed(layout, Arena()))


def test_without_memory_files_each_has_its_own(layout, monkeypatch):
    def refused(name: str, flags: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "memfd_create", refused)
    assert type(arena_for(layout, class_of(library_or_skip()))) is Arena


def test_an_executor_that_keeps_its_layout_shares_nothing(layout):
    from holdfast.worker.executors.tensor_parallel import SingleRank

    library_or_skip()
    executor = CpuExecutor(layout, SingleRank(), max_positions=64, threads=1)
    assert type(executor.packed._arena) is Arena
    executor.close()


def test_nothing_is_shared_where_that_would_cost_large_pages(layout, monkeypatch):
    monkeypatch.setattr(shared_weights, "shares_large_pages", lambda: False)
    assert type(arena_for(layout, class_of(library_or_skip()))) is Arena
