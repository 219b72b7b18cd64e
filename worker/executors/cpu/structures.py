"""C structures of the native executor: a mirror of `native/decoder.h` and `native/sampler.h`, field by field.

They are in files for linear layers, models and steps; here is the order in which the library tells their sizes.
"""

from typing import Final

from holdfast.worker.executors.cpu.linear_structures import (
    NativeAdapted,
    NativeAdaptedSite,
    NativeAdapter,
    NativeLinear,
    NativeLowRank,
    NativeNorm,
    NativePanel,
    NativeSpan,
    NativeUnits,
)
from holdfast.worker.executors.cpu.model_structures import (
    NativeExchange,
    NativeExperts,
    NativeLatent,
    NativeLayer,
    NativeLayerInput,
    NativeMlp,
    NativeModel,
    NativeRecurrence,
    NativeRotary,
    NativeShortConv,
    NativeTokenInputs,
)
from holdfast.worker.executors.cpu.step_structures import (
    NativeAttention,
    NativeAttentionRows,
    NativeDraw,
    NativeDrawn,
    NativeEdits,
    NativeStep,
)

STRUCTURES: Final = (
    *(NativeUnits, NativePanel, NativeLinear, NativeNorm, NativeMlp, NativeExperts, NativeRotary, NativeShortConv),
    *(NativeRecurrence, NativeLatent, NativeLayerInput, NativeTokenInputs, NativeLayer, NativeExchange, NativeModel),
    *(NativeStep, NativeEdits, NativeDraw, NativeDrawn, NativeAttention, NativeAttentionRows, NativeSpan),
    *(NativeAdapted, NativeAdapter, NativeLowRank, NativeAdaptedSite),
)
"""Sizes that must equal the library's: a missing field would shift all fields after it."""
