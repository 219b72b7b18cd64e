"""Training of the bundled model and its draft model: `python -m scripts.train_bundled_model.train`.

On the CPU, with two threads, from a fixed seed, on the text of `corpus.py`. It takes some 8 minutes on two idle cores
(17 minutes of processor time, the evaluation included). The same machine gives the same weights, bit for bit.
"""

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from holdfast.router.text.chat import render_chat
from scripts.train_bundled_model import corpus, vocabulary
from scripts.train_bundled_model.corpus import Document
from scripts.train_bundled_model.evaluate import evaluate, print_scores

MAX_MODEL_LEN: Final = 2048
NUM_THREADS: Final = 2
"""Part of the recipe: sums over threads round differently."""

ROW_TOKENS: Final = 256
LONG_ROW_TOKENS: Final = 512
TOKENS_PER_STEP: Final = 4096
LONG_SHARE: Final = 0.15
"""The last steps read long rows, so that positions up to 512 are trained too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model and how it is trained. Widths stay multiples of 64 on two ranks."""

    folder: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_steps: int
    matrix_lr: float
    """Peak learning rate of Muon, for the matrices inside the layers."""
    vector_lr: float
    """Peak learning rate of AdamW, for embeddings and norms."""


RECIPES: Final = (
    Recipe(
        folder="model",
        hidden_size=256,
        intermediate_size=512,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        num_steps=650,
        matrix_lr=8e-3,
        vector_lr=3e-3,
    ),
    Recipe(
        folder="draft",
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        num_steps=600,
        matrix_lr=1e-2,
        vector_lr=4e-3,
    ),
)


def train_all(output: Path, console: Console) -> None:
    """Writes both folders under `output`."""
    started = time.perf_counter()
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    documents = list(corpus.documents())
    texts = list(_texts(documents))
    tokenizer = vocabulary.train_tokenizer(texts)
    token_ids = _encode(tokenizer, texts)
    num_tokens = sum(map(len, token_ids))
    console.print(f"corpus: {len(documents):,} documents, {num_tokens:,} tokens")
    metadata = {"format": "pt", "corpus_sha256": corpus.digest(documents)}
    for recipe in RECIPES:
        model = train(recipe, token_ids, console)
        save(model, tokenizer, output / recipe.folder, metadata)
    console.print(f"{time.perf_counter() - started:.0f} s in all, written to {output}")


def train(recipe: Recipe, token_ids: Sequence[Sequence[int]], console: Console) -> LlamaForCausalLM:
    """A model trained from scratch on the documents, each given as token ids. Prints the curve of its loss."""
    torch.manual_seed(corpus.SEED)
    model = LlamaForCausalLM(_model_config(recipe))
    optimizers = _optimizers(model, recipe)
    losses: list[float] = []
    batches = _batches(token_ids, recipe.num_steps)
    for rows in track(batches, recipe.folder, recipe.num_steps, console=console, disable=not console.is_terminal):
        _scale_learning_rates(optimizers, _schedule(len(losses), recipe.num_steps))
        losses.append(_step(model, optimizers, rows))
        if len(losses) % 100 == 0 and not console.is_terminal:
            console.print(f"{recipe.folder}: step {len(losses)} of {recipe.num_steps}, loss {losses[-1]:.3f}")
    _print_curve(recipe, losses, console)
    return model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path, metadata: dict[str, str]) -> None:
    """An ordinary Hugging Face folder in bfloat16; tied embeddings are written once."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    GenerationConfig.from_model_config(model.config).save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, str(folder / "model.safetensors"), metadata)
    vocabulary.save_tokenizer(tokenizer, folder, MAX_MODEL_LEN)


def _texts(documents: Iterable[Document]) -> Iterator[str]:
    """Each document without its first token, which `_encode` adds."""
    for document in documents:
        if isinstance(document, str):
            yield document
        else:
            yield render_chat(vocabulary.CHAT_TEMPLATE, document, False, special_tokens={"bos_token": ""})


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Each document between the tokens of its beginning and its end."""
    begin, end = map(vocabulary.SPECIAL_TOKENS.index, (vocabulary.BEGIN_OF_TEXT, vocabulary.END_OF_TEXT))
    return [[begin, *encoding.ids, end] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _batches(token_ids: Sequence[Sequence[int]], num_steps: int) -> Iterator[Tensor]:
    """`num_steps` batches of `TOKENS_PER_STEP` tokens `[rows, length]`: short rows, then long ones."""
    documents = _endless(token_ids)
    num_long = int(num_steps * LONG_SHARE)
    for step in range(num_steps):
        length = ROW_TOKENS if step < num_steps - num_long else LONG_ROW_TOKENS
        yield torch.tensor([_row(documents, length) for _ in range(TOKENS_PER_STEP // length)])


def _endless(token_ids: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    while True:
        yield from token_ids


def _row(documents: Iterator[Sequence[int]], length: int) -> list[int]:
    """Whole documents one after the other; the last is cut off, so that every row begins with a beginning."""
    row: list[int] = []
    while len(row) < length:
        row += next(documents)
    return row[:length]


def _model_config(recipe: Recipe) -> LlamaConfig:
    ids = {token: index for index, token in enumerate(vocabulary.SPECIAL_TOKENS)}
    return LlamaConfig(
        vocab_size=vocabulary.VOCAB_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=ids[vocabulary.BEGIN_OF_TEXT],
        eos_token_id=[ids[vocabulary.END_OF_TEXT], ids[vocabulary.END_OF_TURN]],
        pad_token_id=ids[vocabulary.END_OF_TEXT],
    )


def _optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon needs half the steps of AdamW here, but is made for matrices between hidden states alone."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim < 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, recipe.matrix_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _schedule(step: int, num_steps: int, num_warmup: int = 40) -> float:
    """Share of the peak learning rate: up in a straight line, then down to nothing."""
    return min((step + 1) / num_warmup, 1 - step / num_steps)


def _scale_learning_rates(optimizers: Sequence[torch.optim.Optimizer], share: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * share


def _step(model: LlamaForCausalLM, optimizers: Sequence[torch.optim.Optimizer], rows: Tensor) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _print_curve(recipe: Recipe, losses: Sequence[float], console: Console, num_points: int = 20) -> None:
    """The mean loss of each twentieth of the training, as a bar."""
    console.print(f"{recipe.folder}: loss over {len(losses)} steps")
    width = math.ceil(len(losses) / num_points)
    for first in range(0, len(losses), width):
        part = losses[first : first + width]
        mean = sum(part) / len(part)
        console.print(f"{first + len(part):6d} {mean:6.3f} {'#' * round(8 * mean)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_bundled_model.train", description="Train the bundled models."
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parents[2] / "cluster/bundled_model",
        help="folder to write to (%(default)s)",
    )
    parser.add_argument("--evaluate", action="store_true", help="do not train: examine what is there")
    options = parser.parse_args()
    console = Console()
    if not options.evaluate:
        train_all(options.output, console)
    for recipe in RECIPES:
        print_scores(recipe.folder, evaluate(options.output / recipe.folder), console)


if __name__ == "__main__":
    main()
