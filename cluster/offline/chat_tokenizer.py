"""Tokenizer of `LLM.get_tokenizer`, with the call shape of transformers' tokenizers, as scripts for vLLM use them."""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.cluster.offline.calls import chat_prompt
from holdfast.router.chat import Message
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.special_tokens import NAMED_TOKENS
from holdfast.worker.value_types import is_list

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "padding": (False,),
    "truncation": (False,),
    "max_length": (None,),
    "return_tensors": (None,),
    "return_assistant_tokens_mask": (False,),
    "tokenizer_kwargs": (None, {}),
    "sanitize_control_tokens": (False,),
}
"""Arguments of transformers without effect here, with their neutral values."""


_NOT_HERE: Mapping[str, tuple[object, ...]] = {**_NEUTRAL, "text_pair": (None,), "return_attention_mask": (None, True)}


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask`, as entries and as attributes."""

    @property
    def input_ids(self) -> Any:
        """Token ids, under the name that tokenizers have for them."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """A one for each token."""
        return self["attention_mask"]


class ChatTokenizer(Tokenizer):
    """A tokenizer with what scripts use of transformers' beside encoding: chats, names of tokens, batches.

    `bos_token`, `eos_token_id` and the like are those of tokenizer_config.json, or None.
    """

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTokenizer":
        """The same tokenizer, with a shared cache."""
        made = cls.__new__(cls)
        made.__dict__.update(tokenizer.__dict__)
        return made

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **template_kwargs: Any,
    ) -> Any:
        """The prompt of a conversation, or of each of several: its text, or with `tokenize` its token ids.

        `return_dict` gives token ids as transformers does, as `input_ids` beside `attention_mask`. `chat_template` is a
        template, or the name of one of the model's own; further arguments are variables of it. Raises
        `InvalidRequestError` for messages that are malformed or that the template refuses.
        """
        _check_neutral(template_kwargs, _NEUTRAL)
        if documents is not None:
            template_kwargs["documents"] = list(documents)
        is_one = not is_list(conversation) or not conversation or isinstance(conversation[0], Mapping)
        texts = [
            chat_prompt(
                self,
                messages,  # type: ignore[arg-type]  # it is checked there
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=template_kwargs,
            )
            for messages in ([conversation] if is_one else conversation)
        ]
        if not tokenize:
            return texts[0] if is_one else texts
        token_ids = [self.encode(text, add_special_tokens=False) for text in texts]
        found = token_ids[0] if is_one else token_ids
        return _encoding(found) if return_dict else found

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **wishes: object) -> Encoding:
        """Token ids of a text, or of each of several. Raises `InvalidRequestError` for unsupported arguments."""
        _check_neutral(wishes, _NOT_HERE)
        if wishes:
            raise TypeError(f"unexpected keyword argument {next(iter(wishes))!r}")
        if isinstance(text, str):
            return _encoding(self.encode(text, add_special_tokens))
        return _encoding([self.encode(one, add_special_tokens) for one in text])

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of a token, or of several; special tokens are written out unless they are skipped."""
        return super().decode([token_ids] if isinstance(token_ids, int) else token_ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """The text of each sequence."""
        return [self.decode(one, skip_special_tokens) for one in sequences]

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text as the vocabulary writes them, without special ones around it."""
        return [token or "" for token in self.convert_ids_to_tokens(self.encode(text, add_special_tokens=False))]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token as the vocabulary writes it, or of each of several; of unknown ones `unk_token_id`."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(one) for one in tokens]
        found = self._codec.token_id(tokens)
        return self.unk_token_id if found is None and tokens != self.unk_token else found

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """A token as the vocabulary writes it, or each of several; None of ids that it does not have."""
        return self._codec.token(ids) if isinstance(ids, int) else [self._codec.token(one) for one in ids]

    def get_vocab(self) -> dict[str, int]:
        """The id of each token, as the vocabulary writes it."""
        written = ((self._codec.token(number), number) for number in range(self.vocab_size))
        return {token: number for token, number in written if token is not None}

    def __len__(self) -> int:
        return self.vocab_size

    def __bool__(self) -> bool:
        return True

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the tokens that decoding skips."""
        return sorted(self.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """The same tokens, as the vocabulary writes them."""
        return [token for token in map(self._codec.token, self.all_special_ids) if token is not None]

    def __getattr__(self, name: str) -> Any:
        token = name.removesuffix("_id")
        if token not in NAMED_TOKENS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        written = self.special_tokens.get(token)
        return written if token == name or written is None else self._codec.token_id(written)


def _check_neutral(given: dict[str, Any], table: Mapping[str, tuple[object, ...]]) -> None:
    """Removes arguments without effect here. Raises `InvalidRequestError` if a value is not neutral."""
    for name in given.keys() & table.keys():
        if given.pop(name) not in table[name]:
            raise InvalidRequestError(name, name, "is not supported")


def _encoding(token_ids: Any) -> Encoding:
    is_one = not token_ids or isinstance(token_ids[0], int)
    mask = [1] * len(token_ids) if is_one else [[1] * len(one) for one in token_ids]
    return Encoding(input_ids=token_ids, attention_mask=mask)
