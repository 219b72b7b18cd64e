"""Ranks in processes of their own, each of which lives through one group after another."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from holdfast.worker.executors.rendezvous import Rendezvous


def lives_of(
    num_ranks: int, live: Callable[[int, list[Rendezvous], Connection], None], places: list[Rendezvous]
) -> list[list[Any]]:
    """For each rank what it has sent, and how it ended."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [context.Process(target=live, args=(rank, places, pipes[rank][1])) for rank in range(num_ranks)]
    for process, (_, writer) in zip(processes, pipes, strict=True):
        process.start()
        writer.close()
    return [_life_of(process, reader) for process, (reader, _) in zip(processes, pipes, strict=True)]


def _life_of(process: SpawnProcess, reader: Connection) -> list[Any]:
    life: list[Any] = []
    try:
        while reader.poll(300):
            life.append(reader.recv())
        process.kill()
    except EOFError:
        pass
    process.join()
    return [*life, process.exitcode]
