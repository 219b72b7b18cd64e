"""The native executor where memory runs out: an error of the step, not the end of the process. What is used is kept."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu.library import OUT_OF_MEMORY, load_library
from holdfast.worker.executors.step_sampler import HeadOutput
from tests.draw_params import draw_params
from tests.parity.families import save_tiny_model
from tests.worker.executors.cpu.native import Product
from tests.worker.executors.native_build import compiled


@pytest.mark.timeout(600)
def test_each_allocation_that_fails_is_an_error_of_the_step(tmp_path):
    library = compiled(tmp_path / "failing.so", "failing_new.cpp", "-O2", "-shared", "-fPIC")
    folders = [save_tiny_model(name, tmp_path / name) for name in ("llama", "mixtral")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.executors.no_memory", library, *map(str, folders)],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert all(int(count) > 0 for count in done.stdout.split()), done.stdout


def test_a_weight_that_was_not_packed_is_an_error(monkeypatch):
    library = load_library()
    monkeypatch.setattr(library, "native_pack", lambda *_: OUT_OF_MEMORY)
    with pytest.raises(ReplicaError, match="no memory for the packing of a weight"):
        Product(library, torch.zeros(64, 32))


def test_what_a_draw_uses_is_not_freed_under_it():
    """As where an engine is left behind: its step goes on, on another thread."""
    sampler = OwnPoolSampler.with_threads(1)
    pool, library = ctypes.c_void_p(sampler.own_pool), sampler._library
    logits = torch.randn(200, 100_000, generator=torch.Generator().manual_seed(3))
    params = draw_params(seed=5, first_output_index=0, temperature=1.0, top_k=90_000, top_p=0.99)
    drawing = threading.Thread(target=sampler.sample, args=(HeadOutput(logits, None), [params] * 200))
    drawing.start()
    while library.native_pool_drain(pool) == 0:
        assert drawing.is_alive(), "it ended before it was seen"
    with pytest.raises(ReplicaError, match="under way"):
        sampler.close()
    drawing.join()
    sampler.close()
