"""Tiny models, each made once a session, and what Hugging Face computes with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.families import BASE, save_tiny_model
from tests.parity.harness import hugging_face, reference_logits

PROMPT_LENGTHS = (70, 5, 18)
"""More than 64, less than a block's multiple, and over block borders; windows of 4 are crossed by all."""


@pytest.fixture(scope="module", params=["native", "hf"])
def executor(request: pytest.FixtureRequest) -> str:
    """What runs the model: a test that asks for it runs on both."""
    return request.param


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, BASE["vocab_size"], (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(family)` is the folder of a random model of a family or variant."""
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            folders[family] = save_tiny_model(family, tmp_path_factory.mktemp("model"))
        return folders[family]

    return folder_of


@pytest.fixture(scope="session")
def expected(tiny_model: Callable[..., Path], prompts: list[list[int]]) -> Callable[[str], list[Tensor]]:
    """`expected(family)` are Hugging Face's logits of the prompts, one sequence at a time."""
    known: dict[str, Any] = {}

    def logits_of(family: str) -> list[Tensor]:
        if family not in known:
            known[family] = reference_logits(hugging_face(tiny_model(family)), prompts)
        return known[family]

    return logits_of
