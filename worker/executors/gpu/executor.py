"""GPU executor of the native backend: one rank's share of a model, as Triton kernels over buffers that stay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.draws import DrawParams
from holdfast.worker.executors.adapters import AdaptedLinear, FileContent
from holdfast.worker.executors.gpu.adapter_packing import DeviceAdapter, DevicePlan
from holdfast.worker.executors.gpu.adapters import DeviceAdapters
from holdfast.worker.executors.gpu.draw_launches import DrawnTokens
from holdfast.worker.executors.gpu.fp8_proof import fp8_difference
from holdfast.worker.executors.gpu.graphs import (
    AllBuffers,
    Capture,
    DecodeGraphs,
    Readback,
    Reading,
    StepWait,
    cuda_capture,
)
from holdfast.worker.executors.gpu.launches import Launch, Launches, StepTensors, triton_launch
from holdfast.worker.executors.gpu.layers import DeviceLayers, kv_spec
from holdfast.worker.executors.gpu.rank_exchange import Share, choose_exchange
from holdfast.worker.executors.gpu.sampler import DeviceSampler, Drawing
from holdfast.worker.executors.gpu.step_inputs import BegunStep, HeadShapes, StepInputs
from holdfast.worker.executors.gpu.warm_up import capture_decode_steps, compile_pending
from holdfast.worker.executors.gpu.weights import DeviceWeights
from holdfast.worker.executors.kv_cache import KVCache
from holdfast.worker.executors.layout import DecoderLayout, attention_of
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.step_plan import NO_TOKEN

NUMERICS: Final = "gpu-native-1"
"""The order of all additions and roundings on one kind of device. A change of any bit takes the next number."""

FP8_NUMERICS: Final = "kv-e4m3-1"
"""The same of keys and values in fp8."""

_FEWEST_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device has been given."""

    num_wanted: int
    num_padded: int
    """Rows that the head has run on, the wanted ones first."""
    with_logits: bool
    tokens: Reading | None = None
    """The argmax of each row wanted, where the head gives no logits and there are any."""
    drawing: Drawing | None = None
    """Draws from the logits in the step itself."""


class GpuExecutor:
    """One rank's share of a model on a CUDA device. Used by one thread at a time.

    On CPU tensors it runs under Triton's interpreter, for tests.
    """

    instruction_class: Final = "triton"
    kv_code: Final = "fp8"
    kv_code_numerics: Final = FP8_NUMERICS

    def __init__(
        self,
        layout: DecoderLayout,
        group: TensorParallelGroup,
        *,
        max_positions: int,
        device: torch.device,
        max_rows: int = 2048,
        launch: Launch = triton_launch,
        capture: Capture | None = None,
        share: Share | None = None,
        wait: Callable[..., StepWait] = StepWait,
    ) -> None:
        """Copies the layout's weights to the device. Steps of more than `max_rows` tokens make new buffers.

        `capture` makes a CUDA graph of work, and is torch's on a CUDA device. Ranks whose sums are not taken by the
        device alone run without. `share` lets ranks share memory (see `choose_exchange`). All ranks of the group do
        this together.
        """
        self._group = group
        self._device = device
        self._max_positions = max_positions
        self._weights = DeviceWeights(layout, device, max_positions)
        self._layout = self._weights.layout
        self._progress = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._drawn = DrawnTokens(launch)
        self._num_drawn = 0
        self._launches = Launches(launch)
        self._max_rows = max(max_rows, _FEWEST_ROWS)
        self._exchange = choose_exchange(group, self._max_rows * layout.hidden_size, device, launch, share)
        self._wait = wait(group.data_timeout_s, self._in_vain, self._exchange.give_up)
        self._readback = Readback(device, self._wait)
        self._adapters = DeviceAdapters(self._layout, launch, self._forget_adapted)
        self._layers = DeviceLayers(
            self._weights, group.rank, self._exchange, self._launches, self._adapters, self._progress
        )
        if capture is None and device.type == "cuda":
            capture = cuda_capture
        capture = capture if self._exchange.on_device else None
        self._graphs = DecodeGraphs(capture)
        self._adapted_graphs = DecodeGraphs(capture)  # of steps in which a row has an adapter
        self._sampler = DeviceSampler(
            self._layers.buffers, launch=launch, capture=capture, drawn=self._drawn, wait=self._wait
        )
        attentions = [attention_of(layer) for layer in layout.layers]
        self._head_shapes = HeadShapes.of(attentions)
        self._inputs: StepInputs | None = None
        self._cache: KVCache | None = None
        self._specs = [kv_spec(one) for one in attentions]
        self._in_fp8 = False

    @property
    def overlaps(self) -> bool:
        """Whether a step can be launched before the one before it is collected."""
        return self._exchange.on_device

    def make_sampler(self) -> DeviceSampler:
        return self._sampler

    def close(self) -> None:
        self.drop_cache()
        self._exchange.close()

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of this rank's cache, all layers together."""
        if self._in_fp8:
            return sum(spec.fp8_bytes_per_token for spec in self._specs)
        return sum(spec.values_per_token for spec in self._specs) * self._layout.dtype.itemsize

    def keep_kv_in_code(self) -> None:
        """Keeps keys and values in 8 bits from the next cache on (`worker/executors/kv_cache.py`)."""
        self.drop_cache()
        self._in_fp8 = True

    def kv_code_difference(self, batch: StepBatch) -> str | None:
        """Difference between this device's keys and values in fp8 and the right ones, tried on a batch; None: equal in
        all bits.
        """
        cache = self._cache_of()
        step = self._begin(batch, pads=False).tensors
        return fp8_difference(self._layout, self._layers, step, int(batch.block_ids.max()) + 1, cache.block_size)

    def layers_done(self) -> int:
        """Layers that the device has run since the start, also while a graph runs. Safe to call from any thread."""
        return int(self._progress[0])

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """The cache that steps use from now on. Raises ValueError where the block size does not fit."""
        self.drop_cache()
        self._cache = KVCache.allocate(
            self._specs, num_blocks, block_size, self._layout.dtype, self._device, in_fp8=self._in_fp8
        )
        self._inputs = StepInputs(
            self._head_shapes,
            max_rows=self._max_rows,
            max_positions=self._max_positions,
            block_size=block_size,
            device=self._device,
            wait=self._wait,
        )
        return self._cache

    def state_bytes(self, num_drafts: int) -> int:
        """0: a layout with states is refused."""
        return 0

    def allocate_states(self, num_slots: int, num_drafts: int) -> None:
        """Does nothing: there are no states."""

    def drop_cache(self) -> None:
        self._graphs.clear()
        self._adapted_graphs.clear()
        self._sampler.close()
        self._cache = self._inputs = None

    def free_logits(self) -> None:
        """Does nothing: logits are read from a buffer that stays."""

    def run(self, batch: StepBatch, *, with_logits: bool) -> HeadOutput:
        """One step; all ranks of the group run it together. Blocks are copied before."""
        return self.collect(self.launch(batch, with_logits=with_logits))

    def launch(self, batch: StepBatch, *, with_logits: bool) -> "Launched":
        """Starts one step, and waits for nothing. Steps run in the order of their launches: pending tokens are the last
        sampled ones, from here or from the sampler. At most two are launched before the first is collected; ranks that
        do not lead need not collect. Raises `ReplicaError` if a rank was lost.
        """
        self._wait.wait(None)
        cache = self._cache_of()
        if batch.block_copies.size:
            cache.copy(*torch.from_numpy(batch.block_copies).to(self._device))
        begun = self._begin(batch)
        step, wanted, key = begun.tensors, begun.wanted, begun.key
        if batch.has_pending:
            self._put_in_pending(step.token_ids)
        self._num_drawn = int(batch.num_draws.sum()) if with_logits else 0
        if key is not None and with_logits and (draws := self._draws_in_step(batch)) is not None:
            drawing = self._launch_draws(step, wanted, key, cache, draws)
            return Launched(len(draws), len(wanted), True, drawing=drawing)

        def work() -> None:
            self._run_all(step, wanted, cache, with_logits)

        if key is None:
            work()
        else:
            self._run_graph(step, (*key, with_logits), work)
        num_wanted, num_padded = len(batch.logits_rows), len(wanted)
        self._drawn.last = None
        if with_logits or not num_wanted:
            return Launched(num_wanted, num_padded, with_logits)
        self._drawn.last = tokens = self._layers.buffers.take("tokens", (num_padded,), torch.int32)[:num_wanted]
        return Launched(num_wanted, num_padded, with_logits, tokens=self._readback.start(tokens))

    def _draws_in_step(self, batch: StepBatch) -> Sequence[DrawParams] | None:
        """Draws made in the step's own graph; none on several ranks, whose graphs of a step are all alike."""
        return None if batch.draws is None or self._group.size > 1 else batch.draws()

    def _launch_draws(
        self,
        step: StepTensors,
        wanted: Tensor,
        key: tuple[object, ...],
        cache: KVCache,
        draws: Sequence[DrawParams],
    ) -> Drawing:
        """Starts a step that decodes, and its draws, as one graph."""
        buffers, sampler = self._layers.buffers, self._sampler
        logits = buffers.take("logits", (len(wanted), self._layout.head.out_features))
        inputs = sampler.place(logits[:, : self._layout.vocab_size], draws)

        def work() -> None:
            self._run_all(step, wanted, cache, with_logits=True)
            sampler.draw(inputs)

        self._run_graph(step, (*key, *sampler.key_of(inputs)), work)
        return sampler.send(inputs)

    def _run_graph(self, step: StepTensors, key: tuple[object, ...], work: Callable[[], None]) -> None:
        buffers = self._layers.buffers
        if step.adapted is None:
            self._graphs.run(key, buffers, work)
        else:
            self._adapted_graphs.run(key, AllBuffers((buffers, self._adapters.buffers)), work)

    def _put_in_pending(self, token_ids: Tensor) -> None:
        """Puts the tokens of the last step into this one. All ranks have the argmax tokens; only the leader has tokens
        sampled from logits.
        """
        if self._num_drawn and self._group.size > 1:
            if self._group.rank > 0:
                self._drawn.last = self._layers.buffers.take("drawn", (self._num_drawn,), torch.int32)
            assert self._drawn.last is not None, "the last step's draws are launched before the next step"
            self._exchange.take_from_leader(self._drawn.last)
        self._drawn.put_in(token_ids)

    def collect(self, launched: "Launched") -> HeadOutput:
        """Output of the oldest step that was launched and not collected. Waits for the device, but for logits, which
        the leader alone has. Raises `ReplicaError` as `StepWait.wait` does.
        """
        if launched.drawing is not None:
            return HeadOutput(None, None, sampled=self._sampler.collect(launched.drawing))
        if not launched.with_logits:
            return HeadOutput(None, launched.tokens.wait().tolist() if launched.tokens is not None else [])
        return HeadOutput(self._logits(launched), None)

    def logits_to_draw_from(self, launched: "Launched") -> Tensor | None:
        """The logits of the step launched last, for kernels that are launched before the next one; None where it draws
        by itself.
        """
        return self._logits(launched) if launched.with_logits and launched.drawing is None else None

    def _logits(self, launched: "Launched") -> Tensor | None:
        if self._group.rank > 0:
            return None
        name = "logits" if self._group.size == 1 else "all logits"
        shape = (launched.num_padded, self._group.size * self._layout.head.out_features)
        return self._layers.buffers.take(name, shape)[: launched.num_wanted, : self._layout.vocab_size]

    def _in_vain(self) -> str | None:
        """Reason why running steps will fail; None: they will not."""
        return self._exchange.lost() or ("the replica has failed" if self._group.is_aborted else None)

    def run_layer(self, index: int, x: Tensor, batch: StepBatch) -> Tensor:
        """The residual stream [T, hidden] after one layer, of the step's tokens. Overwrites their slots."""
        cache = self._cache_of()
        step = self._begin(batch, pads=False).tensors
        out: Tensor = self._layers.run_layer(index, x.to(self._device), step, cache).clone()
        return out

    def _run_all(self, step: StepTensors, wanted: Tensor, cache: KVCache, with_logits: bool) -> None:
        """Runs all layers, from token ids to the best token of each wanted row, or to the logits."""
        x = self._layers.run(step, wanted, cache)
        if len(wanted):
            logits = self._layers.logits(x, step)
            if with_logits:
                self._exchange.gather_to_leader(logits, self._layers.buffers)
            else:
                self._layers.find_best(logits)

    def _begin(self, batch: StepBatch, *, pads: bool = True) -> BegunStep:
        """Sends a step, padded to the rows of its graph if it has one."""
        inputs = self._inputs_of()
        begun = inputs.begin_padded(batch) if pads and self._graphs.are_used and batch.is_decode else None
        begun = begun or inputs.begin(batch)
        self._adapters.fit(inputs.max_rows, self._wait)
        num_rows, num_wanted = begun.tensors.num_rows, len(begun.wanted)
        adapted = self._adapters.begin(batch, num_rows, num_wanted, in_graph=begun.key is not None)
        return begun if adapted is None else replace(begun, tensors=replace(begun.tensors, adapted=adapted))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model, which adapters are rounded to."""
        return self._layout.dtype

    def allocate_adapters(self, num_slots: int) -> None:
        """Steps from now on find adapters in slots from 1 to `num_slots`."""
        self._adapters.allocate(num_slots, self._max_rows, self._wait)

    def plan_adapter(self, adapted: Mapping[str, AdaptedLinear]) -> DevicePlan:
        """Plan of packing adapters of one form, by the places of their linears. Safe to call from any thread. Raises
        `ConfigurationError` for places whose adapters the kernels do not add.
        """
        return self._adapters.plan(adapted)

    def pack_adapter(self, plan: DevicePlan, content: FileContent) -> DeviceAdapter:
        """This rank's share of an adapter, from the content of its file. Safe to call from any thread, at any time."""
        return self._adapters.pack(plan, content)

    def put_adapter(self, slot: int, adapter: DeviceAdapter | None) -> None:
        """Steps from now on find it in this slot, from 1 on; None: nothing. Between two steps. Ends what was there."""
        self._adapters.put(slot - 1, adapter)

    def _forget_adapted(self) -> None:
        self._adapted_graphs.clear()

    def warm_up(self, max_rows: int) -> None:
        """Captures all graphs of decode steps of up to `max_rows` sequences, and compiles what puts their tokens into
        the next step, so that none of it is done while requests wait. Without graphs, makes ready for draws.

        Overwrites the first block of the cache.
        """
        self._layers.warm_up()
        if not self._graphs.are_used:
            if self._group.rank == 0 and self._device.type != "cpu":
                self._sampler.warm_up(torch.zeros((max_rows, self._layout.vocab_size), device=self._device))
            return
        cache = self._cache_of()
        capture_decode_steps(self, self._inputs_of(), self._sampler, max_rows, self._meet)
        compile_pending(self, self._sampler, cache.block_size)
        cache.clear(torch.zeros(1, dtype=torch.int64))

    def _meet(self) -> None:
        """Waits on the host for all ranks: the leader's compilation may take longer than devices wait."""
        if self._group.size > 1:
            self._group.all_gather(torch.zeros(1), dim=0)

    def _cache_of(self) -> KVCache:
        assert self._cache is not None, "a cache is allocated before steps run"
        return self._cache

    def _inputs_of(self) -> StepInputs:
        assert self._inputs is not None, "a cache is allocated before steps run"
        return self._inputs


assert NO_TOKEN == -1, "the kernel of the best token says -1"
