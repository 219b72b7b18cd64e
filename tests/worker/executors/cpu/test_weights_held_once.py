"""Weights are in memory once when a model is packed: what they came in is given back, and only what nobody reads."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.worker.executors.cpu.tile_memory import FreedWeights, is_tied, linears, mapped_memory
from holdfast.worker.executors.mapped_files import MappedFiles, discard, span
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.native_backend import make_backend
from tests.counting import mapped_rss
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.worker.executors.models import config_of, layout_of, prepared
from tests.worker.models.layouts import stated

CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4096, "num_hidden_layers": 4}
LIMITS = {"max_model_len": 64, "block_size": 16}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "apart"])
def folder(request, tmp_path_factory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("m") / "model", tie_word_embeddings=request.param, **SIZES)


@pytest.mark.parametrize("size", [1, 2])
def test_no_page_of_the_checkpoint_is_held_once_it_is_packed(folder, size):
    def run(group):
        layout = stated(folder, group)
        backend = make_backend(prepared(layout, group, **LIMITS), group, **LIMITS)
        stretches = [span(weight) for one in linears(layout) for weight in one.weights if weight.nbytes > 2**16]
        return backend, stretches, layout

    results = run_ranks(size, run)
    for _, stretches, _ in results:
        whole = sum(end - start for start, end in stretches)
        held = mapped_rss(set(stretches))
        assert held < 0.1 * whole, f"{held} of {whole} bytes are still there"


def test_converted_weights_leave_no_memory_behind(folder):
    """A checkpoint in float32 that is served in bfloat16: its weights are copies of the loader's."""
    layout = stated(folder, dtype="bfloat16")
    backend = make_backend(prepared(layout, **LIMITS), SingleRank(), **LIMITS)
    stretches = {span(weight) for one in linears(layout) for weight in one.weights if weight.nbytes > 2**16}
    assert mapped_rss(stretches) < 0.1 * sum(end - start for start, end in stretches)
    assert is_tied(layout) or bool(layout.embedding.any()), "the table is still read where it is"
    backend.close()


@pytest.mark.slow
def test_storages_of_weights_end_with_the_load(folder):
    """What lives on of torch's memory is small: norms, biases and, where it is no part of the head, the embedding."""
    gc.collect()
    before = {id(item) for item in gc.get_objects() if isinstance(item, torch.Tensor)}
    layout = stated(folder, dtype="bfloat16")
    backend = make_backend(prepared(layout, **LIMITS), SingleRank(), **LIMITS)
    table, tied = layout.embedding.nbytes, is_tied(layout)
    del layout
    gc.collect()
    storages = {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in [*gc.get_objects(), *backend.executor.packed._kept]
        if isinstance(item, torch.Tensor) and id(item) not in before
    }
    assert sum(storages.values()) < (0 if tied else table) + 2**17
    backend.close()


def test_memory_that_two_parts_share_is_not_given_back():
    layout = layout_of(config_of("llama", hidden_size=64, intermediate_size=4096))
    layout = replace(layout, layers=(layout.layers[0], layout.layers[0]))
    weight = layout.layers[0].mlp.down.weights[0]
    before = weight.clone()
    FreedWeights(layout).read((weight,), slice(None))
    assert torch.equal(weight, before)


def test_pages_of_a_file_can_be_read_again(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 1024)
    tensor = torch.from_file(str(path), shared=False, size=2**18, dtype=torch.uint8)
    before = tensor.clone()
    files = MappedFiles()
    place = files.place_of(tensor[4096:])
    assert place is not None
    assert (place.path, place.offset) == (str(path), 4096)
    assert files.give_back(tensor)
    assert mapped_rss({span(tensor)}) == 0
    assert torch.equal(tensor, before)


def test_a_file_that_was_written_to_in_memory_is_no_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(2**18))
    tensor = torch.from_file(str(path), shared=False, size=2**18, dtype=torch.uint8)
    tensor[5] = 1
    files = MappedFiles()
    assert files.place_of(tensor) is None
    assert not files.give_back(tensor)
    assert tensor[5] == 1


def test_only_whole_pages_are_given_back():
    memory = mapped_memory(3 * 4096)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.fill_(7)
    start, _ = span(tensor)
    discard(start + 1, start + 2 * 4096 + 1)
    assert tensor[:4096].eq(7).all()
    assert tensor[4096 : 2 * 4096].eq(0).all()
    assert tensor[2 * 4096 :].eq(7).all()
