import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from holdfast.router.text.tokenizer import Tokenizer
from scripts.train_bundled_model import vocabulary
from scripts.train_bundled_model.corpus import documents
from scripts.train_bundled_model.train import Recipe, save, train

RECIPE = Recipe(
    folder="tiny",
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    num_steps=8,
    matrix_lr=1e-2,
    vector_lr=1e-2,
)
TOKEN_IDS = [[1, *(3 + (first + step) % 50 for step in range(90)), 0] for first in range(50)]


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def trained() -> tuple[torch.nn.Module, str]:
    console = Console(file=io.StringIO(), width=200)
    return train(RECIPE, TOKEN_IDS, console), console.file.getvalue()


def test_training_lowers_the_loss_and_prints_its_curve() -> None:
    _, output = trained()
    losses = [float(line.split()[1]) for line in output.splitlines()[1:]]
    assert len(losses) == RECIPE.num_steps
    assert losses[-1] < losses[0]


def test_training_again_gives_the_same_weights() -> None:
    (first, _), (second, _) = trained(), trained()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_saves_a_folder_that_transformers_and_we_can_read(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, _ = trained()
    tokenizer = vocabulary.train_tokenizer(text for text in documents(300) if isinstance(text, str))
    save(model, tokenizer, tmp_path, {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert loaded.generation_config.eos_token_id == [0, 2]
    text = "The capital of France is Paris."
    assert Tokenizer.load(str(tmp_path)).encode(text) == AutoTokenizer.from_pretrained(tmp_path).encode(text)
