"""Options of a call besides its prompt and parameters, as keyword arguments shared by the clients of a cluster.

What may not live here: service options alone, which offline callers take as well (`service_options.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.cluster.service_options import ServiceOptions


class CallOptions(ServiceOptions, total=False):
    """Those of chats need `messages`."""

    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables of the chat template, such as `enable_thinking`; `add_generation_prompt` is true unless it is
    here."""
    continue_final_message: bool
    """The output goes on with the last message, whose turn stays open."""
    chat_template: str | None
    """The name of one of the model's chat templates."""
    tools: Sequence[Mapping[str, Any]]
    """Functions that the model may call, in OpenAI's shape. Answers then have `chat`."""
    tool_choice: str | Mapping[str, Any] | None
    """`auto`, `none`, `required`, or an object that names a function."""
    parallel_tool_calls: bool
    """Whether one answer may have several calls; true unless said otherwise."""
    split_reasoning: bool
    """Answers have `chat`, with thoughts apart, where the model's template knows them."""
