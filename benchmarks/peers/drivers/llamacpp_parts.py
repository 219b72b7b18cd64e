"""Parts that all GGUF files have: sizes in the metadata, and tensors of bfloat16. For `llamacpp_convert.py`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def stored_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor's name and its 16-bit words, of a file in safetensors."""
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + header_size)
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        if facts["dtype"] != "BF16":
            raise ValueError(f"{name} is {facts['dtype']}, not BF16")
        first, end = facts["data_offsets"]
        yield name, np.frombuffer(data[first:end].tobytes(), dtype=np.uint16).reshape(facts["shape"])


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Type of the file, and the sizes that config.json names alike."""
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])


def add_words(writer: gguf.GGUFWriter, name: str, words: np.ndarray) -> None:
    """A tensor of bfloat16, by its words."""
    writer.add_tensor(name, np.ascontiguousarray(words).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def numbers_of(words: np.ndarray) -> np.ndarray:
    """The numbers of words of bfloat16, float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)
