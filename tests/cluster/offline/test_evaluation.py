"""Evaluation: perplexity and divergence are those of Hugging Face's logits in float64, on the bundled models."""

import json
import math

import pytest
import torch

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.commands.cli import run
from holdfast.cluster.offline.evaluation import check_sizes, divergence, windows_of
from holdfast.worker.errors import ConfigurationError

TEXT = "The capital of France is Paris. Two plus three is five, and the sky is blue: so it is said in every book. " * 2
CONTEXT = 24
SETTINGS = ["--dtype", "float32", "--num-threads", "1", "--num-blocks", "64", "--context", str(CONTEXT), "--json"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def log_shares(name: str, windows: list[list[int]]) -> list[torch.Tensor]:
    """[scored, vocab] of each window, float64, by Hugging Face."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bundled_path(name), dtype=torch.float64, attn_implementation="eager")
    with torch.inference_mode():
        return [model(torch.tensor([window])).logits[0, :-1].log_softmax(-1) for window in windows]


def expected_windows() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bundled_path("demo") / "tokenizer.json"))
    prefix = tokenizer.encode("").ids
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    step = CONTEXT - len(prefix)
    return [prefix + token_ids[start : start + step] for start in range(0, len(token_ids), step)]


def test_perplexity_and_divergence_are_those_of_hugging_face_in_float64(text, capsys):
    asked = ["--text", str(text), "--reference", str(bundled_path("demo-draft")), "--top", "-1"]
    assert run(["evaluate", "demo", *asked, *SETTINGS]) == 0
    found = json.loads(capsys.readouterr().out)
    windows = [window for window in expected_windows() if len(window) > 1]
    ours, theirs = log_shares("demo", windows), log_shares("demo-draft", windows)
    targets = [torch.tensor(window[1:]) for window in windows]
    own, other = (
        -torch.cat([rows.gather(1, ids[:, None])[:, 0] for rows, ids in zip(model, targets, strict=True)]).mean()
        for model in (ours, theirs)
    )
    p, q = torch.cat(theirs), torch.cat(ours)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    assert found["num_tokens"] == len(p)
    assert found["mean_nll"] == pytest.approx(float(own), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(own), rel=1e-4)
    assert found["reference_mean_nll"] == pytest.approx(float(other), rel=1e-5)
    assert found["divergence"]["kl"] == pytest.approx(float(kl), rel=1e-4)
    assert found["divergence"]["same_first"] == float((p.argmax(-1) == q.argmax(-1)).double().mean())


def test_of_some_tokens_the_divergence_is_a_bound(text, capsys):
    found = []
    for top in ("-1", "100", "8"):
        asked = ["--text", str(text), "--reference", str(bundled_path("demo-draft")), "--top", top]
        assert run(["evaluate", "demo", *asked, "--num-tokens", "60", *SETTINGS]) == 0
        found.append(json.loads(capsys.readouterr().out)["divergence"]["kl"])
    assert found[0] > found[1] > found[2] > 0.5 * found[0]


def test_a_model_is_not_far_from_itself(text, capsys):
    asked = ["--text", str(text), "--reference", "demo", "--num-tokens", "40"]
    assert run(["evaluate", "demo", *asked, *SETTINGS]) == 0
    far = json.loads(capsys.readouterr().out)["divergence"]
    assert (far["kl"], far["same_first"]) == (0, 1)


def test_divergence_counts_what_is_left_as_one():
    p, q = [0.5, 0.3, 0.1, 0.1], [0.25, 0.25, 0.3, 0.2]
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    logs = [dict(enumerate(map(math.log, one))) for one in (p, q)]
    assert divergence(*logs, 4) == pytest.approx(exact)
    first = [{token: one[token] for token in (0, 1)} for one in logs]
    lumped = 0.5 * math.log(2) + 0.3 * math.log(0.3 / 0.25) + 0.2 * math.log(0.2 / 0.5)
    assert divergence(*first, 4) == pytest.approx(lumped)
    assert lumped < exact


def test_windows_lie_one_after_the_other():
    assert windows_of([9], [1, 2, 3, 4, 5], 3) == [[9, 1, 2], [9, 3, 4], [9, 5]]
    assert windows_of([], [1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((1, 1, 100, 64), "--context 1: must be from 2 to 63"),
        ((64, 1, 100, 64), "--context 64: must be from 2 to 63"),
        ((512, -1, 49152, 8192), "--context 512: with 49152 log-probabilities a token, the maximum is 85 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, said):
    with pytest.raises(ConfigurationError, match=f"^{said}"):
        check_sizes(*sizes)


def test_mistakes_of_the_caller_are_named(tmp_path, text, capsys):
    assert run(["evaluate", "demo", "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt: cannot be read" in capsys.readouterr().err
    assert run(["evaluate", "demo"]) == 2
    assert "--text is missing" in capsys.readouterr().err
    assert run(["evaluate", "demo", "--text", str(text), "--top", "2000"]) == 2
    assert "--top 2000: must be from 1 to 1024, or -1 for all" in capsys.readouterr().err
