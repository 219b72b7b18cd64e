"""Logits that are stored in the repository, by their digests: every class on every machine must reproduce them.

A change that changes them changes completions: it takes the next `NUMERICS` (`worker/models/native_backend.py`). Then
write them anew: python -m tests.worker.executors.cpu.test_known_answers
"""

import hashlib
import json
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.worker.executors.coded import UNIT, UNITS_TOGETHER, Offset, UnitForm
from holdfast.worker.executors.cpu.int8_proof import INT8_NUMERICS
from holdfast.worker.executors.layout import DecoderLayout, Mlp, attention_of
from holdfast.worker.executors.linears import Linear
from holdfast.worker.models.native_backend import NUMERICS, UNIT_NUMERICS
from tests.worker.executors.cpu.native import ALL, BF16, F16, F32, library_or_skip, other_classes, same_bits
from tests.worker.executors.cpu.runs import Runner, layout_of
from tests.worker.executors.cpu.test_units import StoredUnits

ANSWERS = Path(__file__).parent / "known_answers.json"
MODELS = {
    "llama": ("llama", (("head_dim", 64),)),
    "gemma2": ("gemma2", (("sliding_window", 70),)),
    "gpt_oss": ("gpt_oss", ()),
    "mixtral": ("mixtral", (("head_dim", 80),)),
    "stablelm": ("stablelm, parallel", ()),
}
DTYPES = {"bfloat16": BF16, "float16": F16, "float32": F32}
CODED = ("llama", "gpt_oss")
"""Whose answers with keys and values in int8 are known too."""
UNITS = {
    "4 bits": (UnitForm(bits=4, offset=Offset.MINIMA, scales=F16),),
    "4 bits, middle": (UnitForm(bits=4, offset=Offset.MIDDLE, scales=F16),),
    "4 bits, zero points": (UnitForm(bits=4, offset=Offset.ZERO_POINTS, scales=F32),),
    "4 bits, bytes": (UnitForm(bits=4, offset=Offset.BYTE_MINIMA, scales=F16),),
    "5 bits": (UnitForm(bits=5, offset=Offset.MINIMA, scales=F16),),
    "5 bits, middle": (UnitForm(bits=5, offset=Offset.MIDDLE, scales=F16),),
    "5 bits, bytes": (UnitForm(bits=5, offset=Offset.BYTE_MINIMA, scales=F16),),
    "6 bits": (UnitForm(bits=6, offset=Offset.BYTE_HALVES, scales=F16),),
    "8 bits": (UnitForm(bits=8, offset=Offset.MIDDLE, scales=F16),),
    "8 bits, zero points": (UnitForm(bits=8, offset=Offset.ZERO_POINTS, scales=BF16),),
}
"""Forms of quantized weights whose answers are known, of a llama whose sums have slices of whole units."""
UNITS["mixed"] = tuple(form for (form,) in UNITS.values())
WHOLE_UNITS = (("head_dim", 32), ("hidden_size", 128), ("intermediate_size", 256))
NUM_TOKENS = 140


def whole_numbers(count: int, seed: int) -> Tensor:
    """From -128 to 127, of integer arithmetic alone: the same on every machine and in every version of torch."""
    state = (torch.arange(count, dtype=torch.int64) * 2654435761 + seed * 40503) % 2**31
    for _ in range(3):
        state = (state ^ (state >> 15)) * 73244475 % 2**31
    return (state >> 8) % 256 - 128


def refilled(layout: DecoderLayout) -> DecoderLayout:
    """The same layout with parameters of our own making. Its angles come from a library's powers and are rounded."""
    for number, tensor in enumerate(parameters(layout)):
        values = whole_numbers(tensor.numel(), number).view(tensor.shape) / 512  # exact in every dtype
        is_norm = tensor.dim() == 1 and bool((tensor.float().mean() - 1.0).abs() < 0.3)
        tensor.copy_(values + 1.0 if is_norm else values)
    dtype = layout.embedding.dtype
    for rotary in layout.rotaries:
        rotary.inverse_frequencies.copy_((rotary.inverse_frequencies.to(dtype).float() * 2**12).round() / 2**12)
    return layout


def parameters(layout: DecoderLayout) -> list[Tensor]:
    """Every parameter once, in the layout's order."""
    found: list[Tensor] = []

    def visit(value: object) -> None:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            for entry in value:
                visit(entry)
        elif hasattr(value, "__dataclass_fields__") and not hasattr(value, "inverse_frequencies"):
            for name in value.__dataclass_fields__:
                visit(getattr(value, name))

    visit(layout)
    return list({tensor.data_ptr(): tensor for tensor in found}.values())


def in_units(layout: DecoderLayout, forms: tuple[UnitForm, ...]) -> DecoderLayout:
    """The same layout with quantized weights of our own making, in these forms by turns, in place of its linears, the
    head's too.
    """
    number, turns = count(1000), cycle(forms)

    def quantized(linear: Linear) -> Linear:
        return replace(
            linear, weights=(), units=tuple(units_of(next(turns), part, next(number)) for part in linear.weights)
        )

    layers = []
    for layer in layout.layers:
        attention, mlp = attention_of(layer), layer.mlp
        assert isinstance(mlp, Mlp)
        attention = replace(attention, qkv=quantized(attention.qkv), output=quantized(attention.output))
        layers.append(
            replace(layer, attention=attention, mlp=replace(mlp, up=quantized(mlp.up), down=quantized(mlp.down)))
        )
    return replace(layout, layers=tuple(layers), head=quantized(layout.head))


def units_of(form: UnitForm, weight: Tensor, seed: int) -> StoredUnits:
    """Of the shape of a weight, with numbers of about its size."""
    (outputs, inputs), units = weight.shape, weight.shape[1] // UNIT
    scales, offsets = (whole_numbers(outputs * units, seed + part).view(outputs, units) for part in (1, 2))
    factors = None
    if form.offset.num_factors:
        together = outputs * -(-units // UNITS_TOGETHER) * form.offset.num_factors
        factors = ((whole_numbers(together, seed + 3) + 160) / 2**21).to(F16).view(outputs, -1, form.offset.num_factors)
        scales, offsets = (one.to(torch.int8) for one in (scales, offsets))
        if form.offset is Offset.BYTE_MINIMA:
            scales, offsets = (one.view(torch.uint8) & 63 for one in (scales, offsets))
        parts = {"scales": scales, "offsets": offsets, "factors": factors}
    else:
        beside = {
            Offset.MIDDLE: None,
            Offset.MINIMA: (offsets / 2**9).to(form.scales),
            Offset.ZERO_POINTS: ((offsets + 128) >> (8 - form.bits)).to(torch.uint8),
        }
        own = ((scales + 160) / 2 ** (8 + form.bits)).to(form.scales)
        parts = {"scales": own, "offsets": beside[form.offset], "factors": None}
    codes = ((whole_numbers(weight.numel(), seed) + 128) >> (8 - form.bits)).to(torch.uint8).view(weight.shape)
    return StoredUnits(rows=(0, outputs), columns=(0, inputs), form=form, codes=codes, **parts)  # type: ignore[arg-type]


def answers_of_units(form: str, name: str) -> str:
    return digest_of(in_units(refilled(layout_of.__wrapped__("llama", BF16, WHOLE_UNITS)), UNITS[form]), name)


def answers(model: str, dtype: torch.dtype, name: str, *, in_int8: bool = False) -> str:
    family, changes = MODELS[model]
    layout = refilled(layout_of.__wrapped__(family, dtype, changes))  # one that nobody else has: it is written over
    return digest_of(layout, name, in_int8=in_int8)


def digest_of(layout: DecoderLayout, name: str, *, in_int8: bool = False) -> str:
    ids = [3 + number % 120 for number in whole_numbers(NUM_TOKENS, 1).tolist()]
    runner = Runner(layout, name=name, in_int8=in_int8)
    logits = runner.run(ids, chunks=(70, 1, 40))
    runner.close()
    assert logits.isfinite().all()
    return hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()[:32]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_the_answers_are_the_known_ones(model, dtype, name):
    if name != "avx2" and name not in other_classes(DTYPES[dtype]):
        pytest.skip("classes in software are for bf16 alone; the plain dtypes run in the others")
    known = json.loads(ANSWERS.read_text())
    assert known["numerics"] == NUMERICS, "new numerics have new answers"
    assert answers(model, DTYPES[dtype], name) == known["logits"][model][dtype]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("model", CODED)
def test_the_answers_in_int8_are_the_known_ones(model, name):
    library_or_skip(name)
    known = json.loads(ANSWERS.read_text())
    assert known["int8 numerics"] == INT8_NUMERICS, "new numerics have new answers"
    assert answers(model, BF16, name, in_int8=True) == known["int8 logits"][model]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("form", UNITS)
def test_the_answers_of_quantized_weights_are_the_known_ones(form, name):
    library_or_skip(name)
    known = json.loads(ANSWERS.read_text())
    assert known["unit numerics"] == UNIT_NUMERICS, "new numerics have new answers"
    assert answers_of_units(form, name) == known["unit logits"][form]


def test_many_rows_of_quantized_weights_have_the_bits_of_few():
    """Which all threads quantize together, inner rows as they are made; each thread quantizes few for itself."""
    layout = in_units(refilled(layout_of.__wrapped__("llama", BF16, WHOLE_UNITS)), UNITS["mixed"])
    ids = [3 + number % 120 for number in whole_numbers(600, 2).tolist()]
    runner = Runner(layout, threads=3)
    few = runner.run(ids, chunks=(20,))
    assert same_bits(runner.run(ids, chunks=(33, 300, 267)), few)
    runner.close()


if __name__ == "__main__":
    logits = {model: {dtype: answers(model, DTYPES[dtype], "avx2") for dtype in DTYPES} for model in MODELS}
    coded = {model: answers(model, BF16, "avx2", in_int8=True) for model in CODED}
    known = {"numerics": NUMERICS, "logits": logits, "int8 numerics": INT8_NUMERICS, "int8 logits": coded}
    known |= {"unit numerics": UNIT_NUMERICS, "unit logits": {form: answers_of_units(form, "avx2") for form in UNITS}}
    ANSWERS.write_text(json.dumps(known, indent=2) + "\n")
