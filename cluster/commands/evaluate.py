"""Command `holdfast evaluate`: a model's perplexity on a text, and its distance from a reference."""

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer, Setting
from holdfast.worker.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.cluster.config.config import HoldfastConfig
    from holdfast.cluster.offline.evaluation import Evaluation
    from holdfast.cluster.offline.inference_engine import InferenceEngine

_ALL = -1  # --top: all tokens
_MOST = 1024  # tokens per position


@takes_settings("model", "parallel", "cache", "scheduler", without=("model.model", "model.seed"))
def evaluate(
    model: Annotated[str | None, Parameter(help="a Hugging Face folder, a GGUF file, a hub id, or demo")] = None,
    /,
    *,
    text: Annotated[
        Path | None, Parameter(group=ESSENTIALS, help="a file of text, UTF-8; - reads it from standard input")
    ] = None,
    reference: Annotated[
        str | None,
        Parameter(
            group=ESSENTIALS, help="reference model to compare with; it is loaded in bfloat16, without --quantization"
        ),
    ] = None,
    context: Annotated[
        int, Parameter(group=ESSENTIALS, help="context length in tokens: the text is scored in windows of this size")
    ] = 512,
    top: Annotated[
        int,
        Parameter(
            group=ESSENTIALS, help="most likely tokens whose probabilities are compared, at each position; -1: all"
        ),
    ] = _MOST,
    num_tokens: Annotated[
        int | None, Parameter(group=ESSENTIALS, help="tokens of the text to read; unset: all")
    ] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", group=ESSENTIALS, negative=(), help="print one JSON object")
    ] = False,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Measure a model's perplexity on a text and, with a reference, how far its probabilities are from that one's.

    Log-probabilities are the values of `prompt_logprobs`.
    """
    from holdfast.cluster.config.config import load_config

    if model is not None:
        settings = {**settings, "model.model": Setting(model, "MODEL")}
    loaded = load_config(settings, config).config
    if not (top == _ALL or 0 < top <= _MOST):
        raise ConfigurationError(f"--top {top}: must be from 1 to {_MOST}, or {_ALL} for all")
    if num_tokens is not None and num_tokens < 1:
        raise ConfigurationError(f"--num-tokens {num_tokens}: must be 1 or more")
    found = _evaluated(loaded, _read(text), reference, (context, top), num_tokens)
    print(json.dumps(_fields(found), indent=2) if as_json else _table(found))
    return 0


def _read(path: Path | None) -> str:
    if path is None:
        raise ConfigurationError("--text is missing: name a file of text, or - for standard input")
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--text {path}: cannot be read: {error}") from error


def _evaluated(
    config: "HoldfastConfig", text: str, reference: str | None, sizes: tuple[int, int], num_tokens: int | None
) -> "Evaluation":
    from holdfast.cluster.commands.generate import engine_here
    from holdfast.cluster.offline.evaluation import check_sizes, evaluate, windows_of
    from holdfast.cluster.progress_bars import progress

    context, top = sizes
    limits = config.limits.model_copy(update={"max_logprobs": _MOST})  # the caller is the user of this command
    config = config.model_copy(update={"limits": limits})
    with ExitStack() as stack:
        engine = engine_here(config)
        stack.callback(engine.stop)
        other = None if reference is None else engine_here(_of_reference(config, reference))
        if other is not None:
            stack.callback(other.stop)
        prefix = engine.tokenizer.encode("", add_special_tokens=True)
        token_ids = _token_ids(engine, other, text)[:num_tokens]
        engines = [engine] if other is None else [engine, other]
        longest = min(one.max_sequence_len for one in engines)
        check_sizes(context, 1 if other is None else top, engine.info.vocab_size, longest, len(prefix))
        windows = windows_of(prefix, token_ids, context)
        if not windows:
            raise ConfigurationError("--text: it has no token that another one stands before")
        report = stack.enter_context(progress(sys.stderr))
        return evaluate(engine, windows, lambda *done: report("evaluate", *done), other, top)


def _of_reference(config: "HoldfastConfig", reference: str) -> "HoldfastConfig":
    changes = {
        "model": reference,
        "quantization": None,
        "quantized_activations": "bfloat16",
        "served_model_name": None,
        "tokenizer": None,
    }
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def _token_ids(engine: "InferenceEngine", other: "InferenceEngine | None", text: str) -> list[int]:
    token_ids = list(engine.tokenizer.encode(text, add_special_tokens=False))
    if other is not None and list(other.tokenizer.encode(text, add_special_tokens=False)) != token_ids:
        raise ConfigurationError("--reference: its tokenizer makes other tokens of the text than the model's")
    return token_ids


def _fields(found: "Evaluation") -> dict[str, Any]:
    return {"perplexity": found.perplexity, **asdict(found)}


def _table(found: "Evaluation") -> str:
    lines = [f"perplexity  {found.perplexity:.4f} ({found.mean_nll:.5f} nats a token, {found.num_tokens} tokens)"]
    if (far := found.divergence) is not None and found.reference_mean_nll is not None:
        compared = "all tokens" if far.top == _ALL else f"the {far.top} likeliest tokens one by one"
        lines.append(f"reference   {found.reference_mean_nll:.5f} nats a token")
        lines.append(f"KL          {far.kl:.3e} nats a token, of {compared}")
        lines.append(f"same first  {far.same_first:.4f}")
    return "\n".join(lines)
