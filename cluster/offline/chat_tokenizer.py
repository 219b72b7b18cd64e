"""Tokenizer of `LLM.get_tokenizer`, which also renders chats, with the call shape of transformers' method."""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.cluster.offline.prompts import chat_prompt
from holdfast.router.chat import Message
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError
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
"""Arguments of transformers that mean nothing here, with the values that ask for nothing."""


class ChatTokenizer(Tokenizer):
    """A tokenizer with `apply_chat_template`."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTokenizer":
        """The same tokenizer; what it has cached is shared."""
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
        for name in template_kwargs.keys() & _NEUTRAL.keys():
            if template_kwargs.pop(name) not in _NEUTRAL[name]:
                raise InvalidRequestError(name, name, "is not supported")
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
        masks = [[1] * len(ids) for ids in token_ids]
        if is_one:
            return {"input_ids": token_ids[0], "attention_mask": masks[0]} if return_dict else token_ids[0]
        return {"input_ids": token_ids, "attention_mask": masks} if return_dict else token_ids
