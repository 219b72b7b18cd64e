"""An `LLM` and its process: what `del` gives back, and what a process has that was forked from a loading one."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import gc, json, os, sys, threading, time, weakref
from holdfast import LLM, SamplingParams

def made():
    return LLM(sys.argv[1], num_threads=2, num_blocks=64)

def asked(llm):
    try:
        return llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)[0].finished
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def in_a_fork(work):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, json.dumps(work()).encode())
        sys.exit(0)  # as a script does: what is to be closed at its end is closed
    os.waitpid(pid, 0)
    return json.loads(os.read(read_end, 4096))

def main():
    said = {}
    llm = made()
    said["here"] = asked(llm)
    said["forked"] = in_a_fork(lambda: asked(llm))
    said["loaded anew"] = in_a_fork(lambda: asked(made()))
    said["here again"] = asked(llm)
    loaded = weakref.ref(llm._engine._replica)
    llm.close()
    gc.collect()
    said["kept when closed"] = loaded() is not None
    llm.close()
    llm = made()
    gone = weakref.ref(llm)
    llm = None
    gc.collect()
    said["kept"] = gone() is not None
    said["threads"] = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
    print(json.dumps(said))

main()
"""


def test_the_first_llm_is_freed_and_forks_work_or_raise(tiny_model: Path):
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tiny_model)], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said.pop("forked").startswith("ReplicaError: this process was forked after the model was loaded")
    assert said == {
        "here": True,
        "loaded anew": True,
        "here again": True,
        "kept when closed": False,
        "kept": False,
        "threads": [],
    }
