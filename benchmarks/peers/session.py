"""Session of one model: starts all servers, checks and measures them side by side, and ends them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.peers import quantized_models
from benchmarks.peers.alternation import Alternation, Limits, Say
from benchmarks.peers.cases import CHECK, PROBE, Case, prompts
from benchmarks.peers.folders import Folders
from benchmarks.peers.install import InstallationError, prepare
from benchmarks.peers.launch import KV_GIB, reason_to_leave_out, start
from benchmarks.peers.machine import available_memory_mib, settle
from benchmarks.peers.peers import ENVIRONMENTS, OURS, Peer
from benchmarks.peers.results import ModelResult, ServerFacts
from benchmarks.peers.server import Server, ServerError

_SETTLE_S: Final = 10.0
_LOADS: Final = 3
"""Copies of the weights that a server may hold while it starts."""
_REPOSITORY: Final = Path(__file__).parents[2]


Ids = list[list[int]]
Compare = Callable[[Path, Ids, Mapping[str, Ids]], dict[str, dict[str, float]]]
"""(model, prompts, outputs by server): how each server's outputs compare with the reference's."""


def compare_with_reference(model: Path, asked: Ids, outputs: Mapping[str, Ids]) -> dict[str, dict[str, float]]:
    """By `reference.py`, in a process of its own: the runner itself loads no model."""
    request = {"model": str(model), "prompts": asked, "outputs": outputs}
    command = [sys.executable, "-m", "benchmarks.peers.reference"]
    ended = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, cwd=_REPOSITORY, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"the reference failed:\n{ended.stderr[-2000:]}")
    checks: dict[str, dict[str, float]] = json.loads(ended.stdout.splitlines()[-1])
    return checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What is measured, on one model after another."""

    folders: Folders
    peers: Sequence[Peer]
    cases: Sequence[Case]
    limits: Limits
    say: Say
    ours: Mapping[str, object] = field(default_factory=dict)
    """Settings of `LLM`."""
    our_peer: Peer = OURS
    compare: Compare = compare_with_reference

    def run(self, model: str, result: ModelResult, store: Callable[[], None]) -> None:
        """Fills `result`, and calls `store` after every case. Raises `ServerError` if ours fails."""
        prepare([model], None, self.folders)
        vocab_size, result.weight_bytes = _sizes(self.folders.served(model))
        servers: list[Server] = []
        outputs: dict[str, Ids] = {}
        try:
            for peer in (self.our_peer, *self.peers):
                result.servers[peer.name] = self._open(peer, model, vocab_size, servers, outputs)
            self._measure(servers, vocab_size, result, store)
            for server in servers:
                result.servers[server.name].peak_memory_mib = server.peak_memory_mib()
        finally:
            for server in servers:
                server.close()
        self.say(f"{model}: comparing greedy ids with the float32 reference")
        checks = self.compare(self.folders.reference(model), prompts(CHECK, vocab_size, "check"), outputs)
        for name, check in checks.items():
            result.servers[name].check = check
        store()

    def _measure(self, servers: list[Server], vocab_size: int, result: ModelResult, store: Callable[[], None]) -> None:
        ours, *peers = servers
        noise = self.limits.noise
        alternation = Alternation(
            ours, peers, vocab_size, self.limits, settle=lambda: settle(noise, _SETTLE_S), say=self.say
        )
        for case in self.cases:
            self.say(f"{case.name}: {case.title}")
            result.cases[case.name] = alternation.measure(case)
            store()

    def _open(
        self, peer: Peer, model: str, vocab_size: int, servers: list[Server], outputs: dict[str, Ids]
    ) -> ServerFacts:
        """Starts one server and adds it to the list; one that cannot be started has its reason in the facts."""
        facts = ServerFacts()
        try:
            self._prepare(peer, model)
            started_s = time.perf_counter()
            server = start(peer, self.folders, model, self.ours, self.folders.log(f"{peer.name}-{model}"))
            servers.append(server)
            facts.versions = server.await_ready()
            answer = server.ask(PROBE.name, prompts(PROBE, vocab_size, "first"), PROBE.max_tokens)
            facts.start_s, facts.start_others = time.perf_counter() - started_s, answer.usage.others
            checked = server.ask(CHECK.name, prompts(CHECK, vocab_size, "check"), CHECK.max_tokens)
            outputs[peer.name] = checked.ids
            facts.idle_share = server.idle_share()
        except (ServerError, InstallationError) as error:
            if peer is self.our_peer:
                raise
            facts.error = str(error)
            if servers and servers[-1].name == peer.name:
                servers.pop().close()
        self.say(
            f"{model}: {peer.name} " + (f"left out: {facts.error}" if facts.error else f"up in {facts.start_s:.1f} s")
        )
        return facts

    def _prepare(self, peer: Peer, model: str) -> None:
        if reason := reason_to_leave_out(peer, self.folders, model):
            raise InstallationError(reason)
        prepare([model], ENVIRONMENTS.get(peer.environment), self.folders)
        weights_mib = _weights_file(self.folders.served(model)).stat().st_size >> 20
        needed_mib = _LOADS * weights_mib + KV_GIB * 1024
        if (there_mib := available_memory_mib()) < needed_mib:
            raise InstallationError(f"{there_mib} MiB of memory are free beside the others, {needed_mib} are wanted")


def _weights_file(model: Path) -> Path:
    return model if model.is_file() else model / "model.safetensors"


def _sizes(model: Path) -> tuple[int, int]:
    """(vocabulary, bytes that a decode step reads: all weights, but for a table of embeddings that is no head)."""
    if model.is_file():
        return quantized_models.sizes(model)
    config = json.loads((model / "config.json").read_text())
    vocab_size, size = int(config["vocab_size"]), _weights_file(model).stat().st_size
    table = 0 if config.get("tie_word_embeddings") else vocab_size * int(config["hidden_size"]) * 2
    return vocab_size, size - table
