"""Native CPU executor: runs the steps of a packed decoder on a separate pool of threads."""

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.adapters import AdaptedLinear, FileContent
from holdfast.worker.executors.cpu.adapters import AdapterPlan, PackedAdapter
from holdfast.worker.executors.cpu.cache import KEPT_AS_INT8, BlockForm, TiledCache, last_block
from holdfast.worker.executors.cpu.decoder import Decoder
from holdfast.worker.executors.cpu.exchange import segments_with_sums, tree_sum
from holdfast.worker.executors.cpu.head_memory import HeadMemory
from holdfast.worker.executors.cpu.int8_proof import INT8_NUMERICS, int8_difference
from holdfast.worker.executors.cpu.launched_runs import LaunchedRun, LaunchedRuns
from holdfast.worker.executors.cpu.library import class_of, kept_forms, load_library
from holdfast.worker.executors.cpu.linear_structures import NativeLinear
from holdfast.worker.executors.cpu.packing import PackedModel
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.running_step import RowMemory, RunningStep
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.executors.cpu.shared_weights import arena_for
from holdfast.worker.executors.cpu.spare_memory import SpareMemory
from holdfast.worker.executors.cpu.states import VALUE_BYTES, StateCache
from holdfast.worker.executors.cpu.tile_memory import Arena
from holdfast.worker.executors.finite import NotFiniteError
from holdfast.worker.executors.kv_cache import BlockMemory
from holdfast.worker.executors.layout import Attention, DecoderLayout, Layer, kv_source
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.model_info import Window


class CpuExecutor:
    """One rank's share of a model on CPUs. Used by one thread at a time."""

    kv_code: Final = "int8"
    kv_code_numerics: Final = INT8_NUMERICS

    def __init__(
        self,
        layout: DecoderLayout,
        group: TensorParallelGroup,
        *,
        max_positions: int,
        threads: int | NativePool,
        instruction_class: str | None = None,
        uses_up: bool = False,
        compacts: bool | None = None,
        head: NativeLinear | None = None,
    ) -> None:
        """Packs the layout's weights. If it `uses_up` the layout, gives their own memory back, and shares the packed
        ones with other processes that have the same. `compacts`: whether weights of bfloat16 are kept in 12 bits, and
        E4M3 as codes, which changes no bit of any result; None: each where that is faster. `head`: packed by another
        executor, which lives longer, in place of the layout's. `threads`: how many it has; or those of another
        executor, which run its steps in turn, of that one's instruction class.

        Raises `Unavailable` where this machine cannot run it, `NotFiniteError` for a weight with a NaN or an infinity.
        """
        self.pool = threads if isinstance(threads, NativePool) else NativePool(threads, load_library(instruction_class))
        self._has_own_pool = self.pool is not threads
        self._library = self.pool.library
        self.instruction_class = class_of(self._library)
        self._group = group
        self._dtype = layout.dtype
        self._vocab_size = layout.vocab_size
        self._hidden = layout.hidden_size
        self._decoder: Decoder | None = None
        self._cache: TiledCache | None = None
        self._states: StateCache | None = None
        self._state_layers = [index for index, layer in enumerate(layout.layers) if layer.state is not None]
        self._kv_sources = [kv_source(layer) for layer in layout.layers]
        self._is_encoder = all(_sees_behind(layer) for layer in layout.layers)
        self._launched = LaunchedRuns()
        self._kept_states = [layer.state for layer in layout.layers if layer.state is not None]
        self._in_int8 = False
        kept = kept_forms(self.instruction_class, compacts)
        self.packed = self._pack(layout, kept, uses_up=uses_up, max_positions=max_positions, head=head)
        self._rows = self.packed.model.vocab_rows
        self._num_segments = 3 * len(self.packed.layers) + 2
        self._sums = segments_with_sums(layout)
        self._layers_done = ctypes.c_long(0)
        self.keeps_hidden = False
        """Whether each step leaves the residual stream of all its rows in `hidden`. The same on all ranks."""
        self.hidden = torch.empty(0)
        """[rows, hidden] behind the last layer of the last step; the next one writes over it."""
        self._adapters: dict[int, PackedAdapter] = {}
        self._spare = SpareMemory()  # of adapters
        self._head = HeadMemory(self._rows, self._vocab_size, self.packed.model.head.groups)
        self._hidden_rows = RowMemory()

    def _pack(self, layout: DecoderLayout, kept: dict[str, Any], *, uses_up: bool, **others: Any) -> PackedModel:
        arena = arena_for(layout, f"{self.instruction_class} {kept}") if uses_up else Arena()
        assert self.pool.handle is not None, "it has just begun"
        try:
            packed = PackedModel(
                layout, self._library, self.pool.handle, uses_up=uses_up, arena=arena, **kept, **others
            )
        except NotFiniteError:
            self.close()
            raise
        model = packed.model
        model.tensor_parallel_size, model.vocab_size = self._group.size, self._vocab_size
        model.first_vocab_row = self._group.rank * model.vocab_rows
        return packed

    @property
    def tensor_parallel_size(self) -> int:
        return self._group.size

    def make_sampler(self) -> NativeSampler:
        """A sampler on the threads of this executor. It is closed before this is."""
        assert self.pool.handle is not None, "the executor is open"
        return NativeSampler(self._library, self.pool.handle)

    def close(self) -> None:
        """Raises `ReplicaError` while a step runs on another thread: its buffers stay as they are."""
        self.drop_cache()
        if self._has_own_pool:
            self.pool.close()

    def _drop_decoder(self) -> None:
        if self._decoder is not None:
            self._launched.land()
            self._decoder.close()
            self._decoder = None

    def __del__(self) -> None:
        if getattr(self, "pool", None):
            with suppress(ReplicaError):
                self.close()

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of this rank's cache, all layers together."""
        return self.block_form.bytes_per_token

    @property
    def block_form(self) -> BlockForm:
        """Decides how the next cache is cut into blocks."""
        return BlockForm(self.packed.kv_specs, self._dtype, self._in_int8)

    def keep_kv_in_code(self) -> None:
        """Keeps keys and values in eight bits from the next cache on (`native/codes.h`)."""
        self.drop_cache()
        self._in_int8 = True

    def kv_code_difference(self, batch: StepBatch) -> str | None:
        """Difference between the library and the rule for keys and values in int8, tried on its own rows; None: equal
        in all bits.
        """
        return int8_difference(self.packed.kv_specs, self._dtype, self._library)

    @property
    def shares_memory(self) -> bool:
        """Whether sums over ranks go through memory that they share. Only once steps have run."""
        return self._decoder is not None and self._decoder.shares_memory

    def layers_done(self) -> int:
        """Layers that have been run since the start, also while a step runs. Safe to call from any thread."""
        return int(self._layers_done.value)

    def allocate_cache(self, num_blocks: int, block_size: int, window: Window | None = None) -> TiledCache:
        """Cache that steps use from now on. Raises ValueError (see `TiledCache`)."""
        self.drop_cache()
        self._cache = TiledCache(
            self.packed.kv_specs,
            num_blocks,
            block_size,
            self._dtype,
            self._library,
            in_int8=self._in_int8,
            window=window,
        )
        self.packed.put_pages(self._cache.addresses, self._cache.tables, self._kv_sources)
        self.packed.model.kept_as = KEPT_AS_INT8 if self._in_int8 else 0
        return self._cache

    def state_bytes(self, num_drafts: int) -> int:
        """Memory of a slot on this rank, if a step has up to this many drafts of a sequence; 0: all layers attend."""
        return VALUE_BYTES * sum(state.state_length(num_drafts) for state in self._kept_states)

    def allocate_states(self, num_slots: int, num_drafts: int) -> None:
        """The slots that steps use from now on, for a model that keeps states."""
        self._drop_decoder()
        lengths = [state.state_length(num_drafts) for state in self._kept_states]
        self._states = StateCache(lengths, num_slots, self._library)
        for index, address, length in zip(self._state_layers, self._states.addresses, lengths, strict=True):
            layer = self.packed.layers[index]
            layer.states, layer.state_length = address, length
            mixer = (layer.conv or layer.recurrence).contents
            mixer.columns = mixer.width - 1 + num_drafts

    def block_memory(self) -> BlockMemory:
        """The caches that were allocated, to be copied between two steps."""
        assert self._cache is not None, "a cache is allocated before blocks are moved"
        if (states := self._states) is None:
            return self._cache.block_memory
        form = f"{self._cache.form} {[pool.shape[1] for pool in states.pools]}"
        return replace(self._cache.block_memory, form=form, states=states.bytes, copy_states=states.copy)

    def warm_up(self, max_rows: int) -> None:
        """Does nothing: no step does what the next need not."""

    def free_logits(self) -> None:
        """Frees the memory of the last step's logits, which the next step would use again."""
        self._head.free()

    def drop_cache(self) -> None:
        self._drop_decoder()
        if self._cache is not None:
            self._cache.close()
        self._cache = None

    def _make_room(self, num_rows: int) -> Decoder:
        self._drop_decoder()
        self._decoder = Decoder(self.packed, self._group, self.pool, num_rows)
        return self._decoder

    def run(self, batch: StepBatch, *, with_logits: bool, inputs: Tensor | None = None) -> HeadOutput:
        """One step, of all ranks together, or the number of steps in the batch. `inputs` [rows, hidden], of one step on
        one rank, take the place of the embedding.
        """
        cache, states = self._cache, self._states
        assert cache is not None, "a cache is allocated before steps run"
        assert not self._launched, "launched steps are collected before another one runs"
        assert (batch.num_window_blocks.size > 0) == (cache.window is not None), "tables are those of the cache"
        if batch.block_copies.size or batch.window_copies.size:
            cache.copy_for(batch)
        if batch.state_copies.size:
            assert states is not None, "states are allocated before steps run"
            states.copy(batch.state_copies)
        if batch.idle_blocks.size or batch.idle_slots.size:
            assert states is not None, "blocks make way for states"
            cache.give_back(batch.idle_blocks)
            states.give_back(batch.idle_slots)
        ahead = cache.ahead
        if ahead.is_on:
            ahead.begin_step()
        try:
            return self._run_several(batch) if batch.num_steps > 1 else self._run_one(batch, with_logits, inputs)
        finally:
            if ahead.is_on:
                ahead.end_step(last_block(batch))

    @property
    def overlaps(self) -> bool:
        """Whether a step can be launched before the one before it is collected: of an encoder on one rank, where steps
        share nothing.
        """
        return self._is_encoder and self._group.size == 1

    def launch(self, batch: StepBatch, *, with_logits: bool) -> LaunchedRun:
        """Starts one step on a thread of the library. It runs after those launched before it."""
        assert self._cache is not None, "a cache is allocated before steps run"
        assert not batch.block_copies.size, "an encoder has no cached prefixes"
        step, decoder = self._step_of(batch, with_logits)
        return self._launched.launch(decoder, step, self._cache.ahead, last_block(batch))

    def collect(self, launched: LaunchedRun) -> HeadOutput:
        """Output of the oldest step that was launched and not collected. Raises `ReplicaError` if it has failed."""
        self._launched.collect(launched)
        return self._output(launched.step)

    def logits_to_draw_from(self, launched: LaunchedRun) -> None:
        """There are none: an encoder draws nothing."""

    @property
    def runs_several_steps(self) -> bool:
        """Whether a batch may be for several steps now. The same on all ranks."""
        return (self._group.size == 1 or self.shares_memory) and not self.keeps_hidden

    def _run_one(self, batch: StepBatch, with_logits: bool, inputs: Tensor | None) -> HeadOutput:
        step, decoder = self._begin(batch, with_logits)
        if inputs is not None:
            decoder.residual(len(inputs)).copy_(inputs)
            decoder.run_segments(1, self._num_segments)
        elif decoder.in_one_call:
            decoder.run_segments(0, self._num_segments)
        else:
            self._run_together(decoder, len(batch.token_ids), 0, self._num_segments)
        return self._output(step)

    def _run_several(self, batch: StepBatch) -> HeadOutput:
        """Runs the batch's number of steps, each with the tokens of the one before."""
        assert len(batch.logits_rows) == len(batch.token_ids), "several steps are decodes"
        batch = replace(batch, token_ids=batch.token_ids.copy(), first_positions=batch.first_positions.copy())
        step, decoder = self._begin(batch, with_logits=False)
        decoder.run_segments(0, self._num_segments)
        drawn = [step.best.tolist()]
        for _ in range(1, batch.num_steps):
            batch.token_ids[:] = step.best
            batch.first_positions += 1
            decoder.begin(step)
            decoder.run_segments(0, self._num_segments)
            drawn.append(step.best.tolist())
        return HeadOutput(None, None, steps=drawn)

    def _begin(self, batch: StepBatch, with_logits: bool, first_layer: int = 0) -> tuple[RunningStep, Decoder]:
        step, decoder = self._step_of(batch, with_logits)
        step.native.first_layer = first_layer
        decoder.begin(step)
        return step, decoder

    def _step_of(self, batch: StepBatch, with_logits: bool) -> tuple[RunningStep, Decoder]:
        """The arrays of a step, and a decoder with room for it."""
        if batch.token_ids.view(np.uint64).max(initial=0) >= self._vocab_size:  # negative ones are large numbers so
            raise ReplicaError(f"a step has a token beyond the vocabulary of {self._vocab_size}")
        if self._state_layers:
            assert self._states is not None, "states are allocated before steps run"
            assert len(batch.state_slots) == len(batch.num_tokens), "each sequence of a step has a slot"
        num_rows = max(len(batch.token_ids), len(batch.logits_rows) + len(batch.pooled_rows))
        if (decoder := self._decoder) is None or num_rows > decoder.max_rows:
            decoder = self._make_room(num_rows)
        step = RunningStep(batch, ctypes.addressof(self._layers_done))
        if with_logits or not decoder.in_one_call:
            self._head.ask_for_own(step)
        if with_logits and self._group.size == 1:
            self._head.ask_for_blocks(step, with_masses=batch.with_masses)
        if with_logits and decoder.shares_memory:
            self._head.ask_for_all(step)
        if batch.adapter_slots.size:
            step.add_adapters({slot: adapter.native for slot, adapter in self._adapters.items()})
        if batch.pooled_rows.size:
            step.ask_for_pooled(self._hidden)
        if self.keeps_hidden:
            self.hidden = self._hidden_rows.of(len(batch.token_ids), self._hidden)
            step.ask_for_hidden(self.hidden)
        return step, decoder

    def _output(self, step: RunningStep) -> HeadOutput:
        if step.logits is None:
            return HeadOutput(None, step.best.tolist(), pooled=step.pooled)
        if self._group.size == 1 or self.shares_memory:
            return HeadOutput(step.logits, None, step.block_best, step.block_mass, pooled=step.pooled)
        return HeadOutput(self._group.all_gather(step.logits)[:, : self._vocab_size], None, pooled=step.pooled)

    def _run_together(self, decoder: Decoder, num_rows: int, first: int, end: int) -> None:
        """Segment by segment, with a sum over ranks after each that leaves one."""
        for segment in range(first, end):
            decoder.run_segments(segment, segment + 1)
            if segment in self._sums:
                partial = decoder.partial(num_rows)
                partial.copy_(tree_sum(self._group, partial))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model, which adapters are rounded to."""
        return self._dtype

    def allocate_adapters(self, num_slots: int) -> None:
        """Does nothing: a slot takes memory with its adapter."""

    def plan_adapter(self, adapted: Mapping[str, AdaptedLinear]) -> AdapterPlan:
        """Plan of packing adapters of one form, by the places of their linears. Safe to call from any thread."""
        return AdapterPlan(self.packed.sites, adapted, self._dtype)

    def pack_adapter(self, plan: AdapterPlan, content: FileContent) -> PackedAdapter:
        """This rank's share of an adapter, from the content of its file. Safe to call from any thread, at any time."""
        return PackedAdapter(self._library, plan, content, self._spare.take(plan.num_bytes))

    def put_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Steps from now on find it in this slot, from 1 on; None: nothing. Between two steps. Ends what was there."""
        if (last := self._adapters.pop(slot, None)) is not None:
            self._spare.give(last.memory)
        if adapter is not None:
            self._adapters[slot] = adapter
            self._spare.prepare(adapter.num_bytes)

    def run_layer(self, index: int, x: Tensor, batch: StepBatch) -> Tensor:
        """The residual stream [T, hidden] after one layer, of the step's tokens. Overwrites their pages. A layer that
        shares the keys and values of another layer reads the ones of the same rows.
        """
        if (source := self._kv_sources[index]) is not None:
            self.run_layer(source, x, batch)
        step, decoder = self._begin(batch, False, first_layer=index)
        (residual := decoder.residual(len(x))).copy_(x)
        if decoder.in_one_call:
            decoder.run_segments(3 * index + 1, 3 * index + 4, index)
        else:
            self._run_together(decoder, len(x), 3 * index + 1, 3 * index + 4)
            decoder.run_segments(0, 0, index)
        del step  # its arrays are read until here
        return residual.clone()


def _sees_behind(layer: Layer) -> bool:
    return isinstance(layer.attention, Attention) and layer.attention.sees_behind
