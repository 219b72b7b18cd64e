"""Likelihood of texts by Hugging Face's own model in float32: the reference of an audit's perplexities."""

from collections.abc import Mapping
from pathlib import Path

from holdfast.cluster.bundled_model.bundled_model import BUNDLED, BUNDLED_DRAFT, PACKAGED, bundled_path, packaged_path
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.checks import check_loaded, first_line


def nats_of_texts(model: str, texts: Mapping[str, str]) -> dict[str, float]:
    """Negative log-likelihood, in nats, of each text's tokens after the first one, by the text's name.

    `model` is a folder, a GGUF file, a hub id, `demo` or `smollm2`; the tokenizer adds its own special tokens. Raises
    `ConfigurationError` if the packages or the model are not there, and `UnsupportedModelError` if weights are missing.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from holdfast.worker.models.weights import in_silence
    except ModuleNotFoundError as missing:
        raise ConfigurationError(f"--reference {model}: a model as a reference needs {missing.name}") from None
    path, options = _location(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
        with in_silence():
            module, info = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, trust_remote_code=False, output_loading_info=True, **options
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = f"no file, no server's address, and transformers cannot load it ({first_line(error)})"
        raise ConfigurationError(f"--reference {model}: {reason}") from None
    check_loaded(module.config.model_type, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    found = {}
    with torch.inference_mode():
        for name, text in texts.items():
            ids = tokenizer(text, return_tensors="pt").input_ids
            logprobs = module(ids).logits[0, :-1].double().log_softmax(-1)
            found[name] = -logprobs.gather(1, ids[0, 1:, None]).sum().item()
    return found


def _location(model: str) -> tuple[str, dict[str, str]]:
    """Folder or hub id, and transformers' further arguments."""
    if model in (BUNDLED, BUNDLED_DRAFT):
        return str(bundled_path(model)), {}
    path = packaged_path() if model == PACKAGED else Path(model)
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    return model, {}
