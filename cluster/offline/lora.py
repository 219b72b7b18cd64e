"""LoRA requests of offline callers: which adapter a prompt runs with, in the shape of vLLM's class of the same name."""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.value_types import is_list, is_whole


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter: name, number, and a folder in PEFT's format.

    The folder is read when name, number and folder come together for the first time; later requests with the same three
    use the adapter that was read then. With `load_inplace`, or another number, it is read anew.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    """Not read: vLLM has it."""
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidRequestError(f"lora_request.{name}", value, "must be a text that is not empty")
        if not is_whole(self.lora_int_id) or self.lora_int_id < 1:
            raise InvalidRequestError("lora_request.lora_int_id", self.lora_int_id, "must be a whole number from 1 on")

    @property
    def name(self) -> str:
        """Same as `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """Same as `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """Same as `lora_path`."""
        return self.lora_path


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one for each."""


def lora_of_each(
    lora_request: LoRARequest | Sequence[LoRARequest | None], num_prompts: int
) -> list[LoRARequest | None]:
    """One for each prompt. Raises `InvalidRequestError`."""
    if isinstance(lora_request, LoRARequest):
        return [lora_request] * num_prompts
    if not is_list(lora_request) or not all(one is None or isinstance(one, LoRARequest) for one in lora_request):
        limit = "must be a LoRARequest, or a list with one, or None, for each prompt"
        raise InvalidRequestError("lora_request", lora_request, limit)
    if len(lora_request) != num_prompts:
        raise InvalidRequestError("lora_request", len(lora_request), f"must be one, or {num_prompts} of them")
    return list(lora_request)  # type: ignore[arg-type]  # each of them was looked at
