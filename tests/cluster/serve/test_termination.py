import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import asyncio, ctypes, os, signal, threading
    from holdfast.cluster.serve.member_process import end_on_sigterm

    async def end():
        print("ended gracefully", flush=True)
        await asyncio.sleep({takes_s})

    async def begin():
        end_on_sigterm(end, limit_s={limit_s})
        print("began", flush=True)

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever).start()
    asyncio.run_coroutine_threadsafe(begin(), loop)
    ctypes.CDLL(None).sleep(60)  # the main thread, as Ray keeps it
    ctypes.CDLL(None).sleep(60)
"""


@pytest.mark.parametrize(("takes_s", "limit_s"), [(0, 60), (60, 0.1)], ids=["in time", "too slow"])
def test_a_process_whose_main_thread_is_not_in_python_ends_at_sigterm(takes_s: float, limit_s: float):
    program = textwrap.dedent(PROGRAM.format(takes_s=takes_s, limit_s=limit_s))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        process.terminate()
        assert process.stdout.readline() == "ended gracefully\n"
        assert process.wait(20) == 0
