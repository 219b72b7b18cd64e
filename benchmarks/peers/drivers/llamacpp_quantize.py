"""Quantizes a GGUF file by llama.cpp's own quantizer: llamacpp_quantize.py IN OUT TYPE, TYPE as `q4_0`.

The type of each tensor is what `llama-quantize` would choose: heads and some layers may have more bits.
"""

import sys

import llama_cpp

TYPES = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def main() -> None:
    source, out, kind = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = TYPES[kind], True
    llama_cpp.llama_backend_init()
    if code := llama_cpp.llama_model_quantize(source.encode(), out.encode(), params):
        raise SystemExit(f"{source}: llama.cpp's quantizer returned {code}")


if __name__ == "__main__":
    main()
