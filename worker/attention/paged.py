"""Attention over the paged cache.  [signatures first]

Use by ModelRunner:
    context = AttentionContext(cache, tiles)                # one per rank, after KVCache.allocate
    for module, layer in ...: module.paged_attention = PagedAttention(context, layer_index)
    each step:  context.begin(batch)   # plan once: slots, masks, index tensors, fresh blocks zeroed
                model(...)             # every PagedAttention reads context.step
"""
from torch import Tensor
from worker.kv_cache import KVCache
from worker.row_tiles import RowTiles
from worker.step_batch import StepBatch

class AttentionContext:
    """What the attention layers of one rank share: the cache, the kernels' row rules, and the step now running."""
    def __init__(self, cache: KVCache, tiles: RowTiles) -> None: raise NotImplementedError
    def begin(self, batch: StepBatch) -> None:
        """Plans the step that follows; all layers read this plan."""
        raise NotImplementedError

class PagedAttention:
    def __init__(self, context: AttentionContext, layer: int) -> None: raise NotImplementedError
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None = None,
                 softcap: float | None = None, s_aux: Tensor | None = None) -> Tensor:
        """query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv]. T = tokens of the step, packed in plan order."""
        raise NotImplementedError
