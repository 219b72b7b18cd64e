"""`LLM.generate` in a process of its own: the same requests as `clients.py` sends, without router, link and client."""

import argparse
import asyncio
import time
from typing import Any

from benchmarks.router_parts.load import PROMPT
from benchmarks.router_parts.orders import run, say, take_orders
from holdfast.cluster.offline.llm import LLM
from holdfast.worker.sampling_params import SamplingParams


async def main(model: str) -> None:
    llm = await asyncio.to_thread(LLM, model)

    def generate(order: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(max_tokens=order["tokens"])
        began_s = time.monotonic()
        outputs = llm.generate([PROMPT] * order["streams"], params, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {"tokens": tokens, "seconds": time.monotonic() - began_s}

    async def carry_out(order: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(generate, order)

    say()
    await take_orders(carry_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="its folder")
    run(main(parser.parse_args().model))
