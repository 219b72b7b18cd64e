"""The HF backend on a GPU, without one: paged kernels under Triton's interpreter, graphs on a tape.

Greedy tokens are Hugging Face's, and a row has the same bits in any company, chunk and graph.
"""

import logging
from functools import partial

import pytest
import torch

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.executors.gpu.launches import Launches
from holdfast.worker.executors.gpu.paged_kernels import PagedKernels, unfit
from holdfast.worker.executors.gpu.products import DeviceExperts, DeviceProduct, RowFunctions
from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.experts import Experts
from holdfast.worker.models.linear import settle
from holdfast.worker.models.parallelize import Target
from tests.draw_params import changed
from tests.parity.families import NOT_NATIVE, SERVED
from tests.worker.executors.cpu.native import library_or_skip
from tests.worker.executors.cpu.runs import tokens
from tests.worker.executors.gpu.drawn import FILTERS
from tests.worker.executors.gpu.tape import Tape, TapingDevice
from tests.worker.executors.gpu.test_whole_step import VIEWS, Operations
from tests.worker.executors.steps import Part, batch_of
from tests.worker.models import hf_models
from tests.worker.models.capture_watch import reason_against_capture
from tests.worker.models.hf_models import BLOCK, check_family, module_of

CPU, META = torch.device("cpu"), torch.device("meta")


def some_every_time(names, few):
    return [pytest.param(name, marks=[] if name in few else pytest.mark.slow) for name in sorted(names)]


Served = partial(hf_models.Served, launch=launch)


def with_graphs(family):
    device = TapingDevice(launch)
    return Served(family, graphs=True, launch=device.launch, capture=device.capture)


@pytest.mark.parametrize("family", some_every_time(NOT_NATIVE, ["gpt2"]))
def test_greedy_tokens_are_hugging_faces_and_a_rows_bits_its_own(family):
    device = TapingDevice(launch)
    together = Served(family, graphs=True, launch=device.launch, capture=device.capture)
    check_family(Served(family), together)
    assert len(device.tapes) == 3, "of 1, 2 and 4 rows"


def test_a_replayed_step_copies_its_arrays_and_makes_no_tensor(monkeypatch):
    """One copy to the device; the graph does the rest, so nothing is launched and nothing waited for."""
    served = with_graphs("gpt2")
    served.backend.warm_up(2)
    monkeypatch.setattr(Tape, "replay", lambda tape: None)
    batch = batch_of([Part(4, [5], [1]), Part(7, [6], [2])], BLOCK)
    before = served.backend.progress.count
    with Operations() as operations:
        served.backend.run(batch, with_logits=True)
    as_numpy = {"to", "resolve_conj", "resolve_neg"}  # of the array on the host
    assert set(operations.names) <= VIEWS | as_numpy | {"copy_"}, operations.names
    assert operations.names["copy_"] == operations.names["to"] == 1
    assert served.backend.progress.count > before, "the watchdog sees that steps are run"


def test_tokens_are_drawn_on_the_device_as_the_native_sampler_draws_them():
    library_or_skip()
    native, served = OwnPoolSampler.with_threads(1), Served("gpt2")
    served.backend.warm_up(2)
    assert served.backend.sampler.numerics == native.numerics
    parts = [Part(0, tokens(3, seed), served.blocks(3)) for seed in range(2)]
    batch = batch_of(parts, BLOCK)
    draws = [changed(each, temperature=1.5, seed=row) for row, each in enumerate([FILTERS["top-p"]] * 6)]
    draws[1] = changed(draws[1], num_logprobs=2)
    output = served.backend.run(batch, with_logits=True)
    kept = HeadOutput(output.logits.clone(), None)
    assert served.backend.sampler.sample(output, draws) == native.sample(kept, draws)
    assert torch.equal(output.logits, kept.logits)
    native.close()


def test_a_capture_that_fails_leaves_all_steps_eager(caplog):
    served = with_graphs("gpt2")

    def fail(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    served.backend._steps._graphs._capture = fail
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        served.backend.warm_up(2)
    assert [record.message for record in caplog.records if "without CUDA graphs" in record.message] == [
        "decode steps run without CUDA graphs: a capture failed (operation not permitted when stream is capturing)"
    ]
    ids = tokens(6)
    assert torch.equal(served.run(ids, (5, 1)), Served("gpt2").run(ids, (6,)))


def attend_alone(query, key, value, **settings):
    """What attention gives where each token sees itself alone: [1, H, T, D] each -> [1, T, H, Dv]."""
    return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2)


def nothing(kernel, grid, arguments, **options):
    """Launches on a device without memory."""


def reason_against(family, launch=nothing):
    """On a device without memory; a model as `HfDeviceBackend` has it."""
    target = Target(group=SingleRank(), device=META, dtype=torch.bfloat16)
    module = module_of(family, target)
    for part in list(module.modules()):
        part.paged_attention = attend_alone
        part.warn_if_padding_and_no_attention_mask = lambda *arguments: None  # as `RankModel` has it
        if isinstance(part, Experts):
            part.group(partial(DeviceExperts, launch))
    settle(module, partial(DeviceProduct, Launches(launch)))
    token_ids, positions, rows = (torch.zeros(8, dtype=torch.int64, device=META) for _ in range(3))

    def step():
        with RowFunctions(launch, META):
            module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)

    return reason_against_capture(step)


@pytest.mark.parametrize("family", some_every_time(SERVED, ["gpt2", "deepseek_v3", "phimoe"]))
def test_the_code_of_nearly_all_families_may_be_captured_on_a_gpu(family):
    """One family makes a tensor on the host."""
    reason = reason_against(family)
    assert reason == ("values go between cpu and meta (aten._to_copy.default)" if family == "phimoe" else None)


def test_code_that_reads_values_may_not_be_captured():
    zeros = torch.zeros(8)
    ids = torch.zeros(8, dtype=torch.int64)
    assert reason_against_capture(lambda: zeros[: int(ids.max()) + 1]).startswith("a value is read")
    assert reason_against_capture(lambda: zeros[ids == 0]).startswith("a size depends on values")
    assert reason_against_capture(lambda: zeros[ids]) is None


SPEC = KVSpec(num_heads=2, num_kv_heads=1, key_dim=12, value_dim=8, sliding_window=200, softcap=4.0, has_sinks=True)


def test_what_the_kernels_do_not_run_is_refused():
    wide = KVSpec(num_heads=2, num_kv_heads=2, key_dim=264, value_dim=8)
    assert "264 dimensions" in unfit([wide])
    assert "among 65 query heads" in unfit([KVSpec(num_heads=65, num_kv_heads=1, key_dim=8, value_dim=8)])
    assert unfit([SPEC]) is None
    with pytest.raises(ValueError, match="blocks of 48"):
        PagedKernels([SPEC], max_positions=64, block_size=48, device=CPU, launch=launch)
