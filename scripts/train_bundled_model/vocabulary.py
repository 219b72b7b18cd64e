"""Tokenizer of the bundled models: a byte-level BPE trained on the corpus, its special tokens and its chat template.

Digits are tokens of their own, so that sums are learned digit by digit.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE: Final = 1024

END_OF_TEXT: Final = "<|end_of_text|>"
BEGIN_OF_TEXT: Final = "<|begin_of_text|>"
END_OF_TURN: Final = "<|end|>"
SPECIAL_TOKENS: Final = (END_OF_TEXT, BEGIN_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>")
"""Their ids are their places in this list."""

CHAT_TEMPLATE: Final = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role not in ('system', 'user', 'assistant') -%}
        {{- raise_exception('roles are system, user and assistant, not ' ~ message.role) -}}
    {%- endif -%}
    {%- if message.content is not string -%}
        {{- raise_exception('content must be text') -}}
    {%- endif -%}
    {{- '<|' ~ message.role ~ '|>' ~ (message.content | trim) ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` tokens: any text can be encoded, and decoding gives it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = (BEGIN_OF_TEXT, tokenizer.token_to_id(BEGIN_OF_TEXT))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN_OF_TEXT} $A", pair=f"{BEGIN_OF_TEXT} $A {BEGIN_OF_TEXT} $B", special_tokens=[begin]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_model_len: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as transformers and Holdfast read them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
