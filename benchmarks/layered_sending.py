"""Benchmark of sending by layers: how much sooner a prompt's blocks would be at the replica that decodes it, if each
layer of a chunk were sent once it is computed, and not each block once its chunk is.

    python -m benchmarks.layered_sending [--step-model FILE] [--kib-per-token 22.5] [--layers 30] [--chunk 512]
                                         [--prompts 512,1024,4096] [--gbit 1,10,25] [--json FILE]

A model in two lines of time, the steps and the link, by the measured step times of `benchmarks.roles` or of
`benchmarks.step_model`. A block is whole after the last layer, so sending by layers gains at most the transfer of one
chunk. It gains nothing for the first token, which comes from the replica that computes the prompt. Printed: the time
to the first token; the wait from there until the last block has come, by blocks, by layers, and by blocks of chunks
of a quarter, with the time that these cost more; and the gain as a share of the time until the second token can be
computed.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.roles import STEP_COSTS
from holdfast.cluster.simulate.capacity.capacity_report import read_step_costs
from holdfast.worker.scheduler.step_time import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Figures of one prompt over one link; times in seconds."""

    num_tokens: int
    gbit: float
    ttft_s: float
    by_blocks_s: float
    """From the first token until the last block has come."""
    by_layers_s: float
    quarter_chunks_s: float
    """The same by blocks, with chunks of a quarter."""
    quarter_ttft_s: float
    """Time to the first token with these."""

    @property
    def share(self) -> float:
        """Gain by layers, of the time until the second token can be computed."""
        return (self.by_blocks_s - self.by_layers_s) / (self.ttft_s + self.by_blocks_s)


def steps(costs: StepCosts, num_tokens: int, chunk: int) -> Iterator[tuple[int, float]]:
    """Tokens and seconds of each step of a prompt."""
    for first in range(0, num_tokens, chunk):
        count = min(chunk, num_tokens - first)
        yield count, costs.base_s + count * (costs.token_s + (first + count / 2) * costs.context_token_s)


def arrival(parts: Sequence[tuple[int, float]], token_s: float, num_pieces: int) -> tuple[float, float]:
    """When the last step ends, and when its last piece has come: each step gives `num_pieces` pieces, evenly spread
    over it, which the link sends in order at `token_s` a token.
    """
    began_s = link_free_s = 0.0
    for count, step_s in parts:
        for piece in range(1, num_pieces + 1):
            there_s = began_s + step_s * piece / num_pieces
            link_free_s = max(link_free_s, there_s) + count * token_s / num_pieces
        began_s += step_s
    return began_s, link_free_s


def gain(costs: StepCosts, num_tokens: int, chunk: int, num_layers: int, token_bytes: float, gbit: float) -> Gain:
    """Figures of a prompt."""
    token_s = token_bytes * 8 / (gbit * 1e9)
    whole, quarters = (list(steps(costs, num_tokens, size)) for size in (chunk, max(1, chunk // 4)))
    ttft_s, by_blocks_s = arrival(whole, token_s, 1)
    _, by_layers_s = arrival(whole, token_s, num_layers)
    quarter_ttft_s, by_quarters_s = arrival(quarters, token_s, 1)
    return Gain(
        num_tokens=num_tokens,
        gbit=gbit,
        ttft_s=ttft_s,
        by_blocks_s=by_blocks_s - ttft_s,
        by_layers_s=by_layers_s - ttft_s,
        quarter_chunks_s=by_quarters_s - quarter_ttft_s,
        quarter_ttft_s=quarter_ttft_s,
    )


def show(gains: Sequence[Gain]) -> None:
    """A row for each prompt and link."""
    table = Table("prompt", "Gbit/s", "TTFT ms", "blocks, ms after", "layers", "gain", "chunks of a quarter", "TTFT ms")
    for one in gains:
        times = (one.ttft_s, one.by_blocks_s, one.by_layers_s, one.quarter_chunks_s, one.quarter_ttft_s)
        ttft, blocks, layers, quarters, quarter_ttft = (f"{1e3 * time_s:.1f}" for time_s in times)
        table.add_row(
            f"{one.num_tokens:,}", f"{one.gbit:g}", ttft, blocks, layers, f"{one.share:.1%}", quarters, quarter_ttft
        )
    Console(width=120).print(table)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-model", type=Path, help="JSON of benchmarks.step_model; default: SmolLM2-135M")
    parser.add_argument("--kib-per-token", type=float, default=22.5)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--chunk", type=int, default=512, help="scheduler.max_num_batched_tokens")
    parser.add_argument("--prompts", default="512,1024,4096", help="tokens of prompts, with commas")
    parser.add_argument("--gbit", default="1,10,25", help="speeds of links, with commas")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    costs = read_step_costs(arguments.step_model) if arguments.step_model else STEP_COSTS
    token_bytes = 1024 * arguments.kib_per_token
    gains = [
        gain(costs, int(prompt), arguments.chunk, arguments.layers, token_bytes, float(gbit))
        for gbit in arguments.gbit.split(",")
        for prompt in arguments.prompts.split(",")
    ]
    show(gains)
    if arguments.json:
        arguments.json.write_text(json.dumps([{**asdict(one), "share": one.share} for one in gains], indent=1))


if __name__ == "__main__":
    main()
