"""Benchmark of sending: the CPU time that it takes from the steps of a replica whose streams decode meanwhile.

    python -m benchmarks.sending_share [--model smollm2] [--tokens 2000] [--streams 8] [--new-tokens 128] [--json FILE]

A replica has a prompt cached, and decodes streams. Another process fetches the prompt's blocks again and again, as
another replica does, over TCP and through shared memory. Printed: the CPU time of copying blocks on the thread of the
steps, and of digests and sending on that of the connection, as shares of the process's; and the bytes that were sent.
"""

import argparse
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.decoding_streams import begin_streams, cpu_times, parser_of, prompt_of
from benchmarks.disk_tier import first_token
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.worker.block_hash import HashChain
from holdfast.worker.engine.block_frames import Block
from holdfast.worker.engine.block_receiver import BlockReceiver
from holdfast.worker.engine.block_sockets import BlockServer
from holdfast.worker.engine.frame_receiver import FrameMemory
from holdfast.worker.engine.outgoing_blocks import OutgoingBlocks
from holdfast.worker.engine.staging import SharedMemory
from holdfast.worker.engine.tier_mover import KV
from holdfast.worker.engine.transfer_key import TransferKey
from holdfast.worker.replica.replica import Replica

SENDING: dict[tuple[type[Any], str], str] = {(OutgoingBlocks, "send"): "copying", (BlockServer, "_serve"): "sending"}
"""What sending costs: copies on the thread of the steps, and the connections' threads."""
LASTS_S = 30.0
LOOPBACK = "127.0.0.1"


def fetch(orders: Connection, names: Sequence[bytes], way: str) -> None:
    """The other process: receives a transfer for each order, and says how many bytes have come."""
    memory = FrameMemory()
    orders.send(0)  # it is ready: a sender waits for seconds alone
    while (order := orders.recv()) is not None:
        port, transfer, key = order
        over, num_bytes = threading.Event(), 0

        def take(blocks: Sequence[Block]) -> bool:
            nonlocal num_bytes
            num_bytes += sum(len(row) for _, row in blocks)
            return True

        def end(_: Exception | None, over: threading.Event = over) -> None:
            over.set()

        by = SharedMemory() if way == "auto" else None
        BlockReceiver((LOOPBACK, port), TransferKey(transfer, key).of_rank(0), names, take, end, by, memory).start()
        over.wait()
        orders.send(num_bytes)


def begin_sending(replica: Replica, names: Sequence[bytes]) -> tuple[int, bytes, bytes]:
    """Begins to send these blocks; the port, and the transfer's number and key."""
    key = TransferKey.fresh(is_encrypted=False)

    def begin() -> int:
        movers, sendings = replica.movers, replica.engine.tier.sendings
        assert movers is not None, "it sends blocks"
        ((_, port),) = movers.listen(LOOPBACK)
        number = sendings.begin(sendings.found(names), replica.engine.now(), LASTS_S)
        movers.offer(number, key, movers.own.share.heads)
        return port

    return replica.engine.between_steps(begin).result(), key.transfer, key.key


def measure(arguments: argparse.Namespace, way: str) -> dict[str, Any]:
    """CPU time of the streams and of what is sent meanwhile, by one way."""
    prompt = prompt_of(1, arguments.tokens)
    cache = {"num_blocks": arguments.tokens // 16 + 16 * arguments.streams * 2, "kv_transfer_way": way}
    with cpu_times(SENDING) as spent, InferenceEngine(arguments.model, {"cache": cache}) as engine:
        first_token(engine, prompt)
        replica, _ = engine._running()
        size, chain = replica.info.block_size, HashChain("")
        names = [KV + chain.hash_of(index, prompt, size) for index in range(len(prompt) // size)]
        here, there = multiprocessing.get_context("spawn").Pipe()
        other = multiprocessing.get_context("spawn").Process(target=fetch, args=(there, names, way), daemon=True)
        other.start()
        here.recv()
        here.send(begin_sending(replica, names))
        assert here.recv() > 0, "blocks come"
        before, began_cpu_s = dict(spent), time.process_time()
        handles = begin_streams(engine, arguments)
        waiter = threading.Thread(target=lambda: [handle.result() for handle in handles])
        waiter.start()
        num_bytes = num_transfers = 0
        while waiter.is_alive():
            here.send(begin_sending(replica, names))
            num_bytes += here.recv()
            num_transfers += 1
        took_s = time.process_time() - began_cpu_s
        here.send(None)
        other.join()
    parts = {name: value - before[name] for name, value in spent.items()}
    shares = {f"{name}_share": value / took_s for name, value in parts.items()}
    return {"way": way, "cpu_s": took_s, "bytes": num_bytes, "transfers": num_transfers, **parts, **shares}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A row for each way."""
    table = Table("way", "MB sent", "CPU s", "copying", "digests and sending", "together")
    for row in rows:
        shares = row["copying_share"], row["sending_share"]
        table.add_row(
            row["way"],
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['cpu_s']:.2f}",
            *(f"{share:.2%}" for share in (*shares, sum(shares))),
        )
    Console().print(table)


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__, 2000, 128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(arguments, way) for way in ("tcp", "auto")]
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": os.getloadavg(), "ways": rows}, indent=1))


if __name__ == "__main__":
    main()
