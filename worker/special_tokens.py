"""Special tokens of a model's folder: those of tokenizer_config.json, also where tokenizer.json does not mark them."""

import json
from pathlib import Path
from typing import Any, Final

from holdfast.worker.errors import ConfigurationError

NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def named_tokens(folder: Path) -> dict[str, str]:
    """Named tokens of tokenizer_config.json, which takes precedence over the older special_tokens_map.json."""
    entries = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    named = {name: _token_text(entries.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in named.items() if text is not None}


def configured_special(folder: Path) -> list[str]:
    """Tokens that tokenizer_config.json calls special, beside the named ones."""
    entries = read_json(folder / "tokenizer_config.json")
    added = entries.get("added_tokens_decoder")
    found = [one for one in added.values() if _is_special(one)] if isinstance(added, dict) else []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = entries.get(name)
        found += more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
    return [text for text in map(_token_text, found) if text is not None]


def generation_ends(folder: Path) -> list[int]:
    """The tokens by which generation_config.json has an output end."""
    eos = read_json(folder / "generation_config.json").get("eos_token_id")
    return [i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"cannot read {path}: {error}; fetch the model again") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"cannot read {path}: it must hold a JSON object; fetch the model again")
    return content


def _token_text(entry: object) -> str | None:
    """The text of an entry, which is a string or an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _is_special(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("special") is True
