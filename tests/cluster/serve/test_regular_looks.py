"""Something is looked at until a block ends, also after a look that has failed."""

import threading

from holdfast.cluster.serve.disk_guard import regular_looks


def test_a_look_that_fails_is_not_the_last():
    looks, enough = [], threading.Event()

    def look() -> None:
        looks.append(None)
        if len(looks) >= 3:
            enough.set()
        raise ConnectionError("the GCS is away")

    with regular_looks(look, every_s=0.001, name="test-looks"):
        assert enough.wait(30)
    num_looks = len(looks)
    assert num_looks >= 4, "and once more in the end"
    assert not [thread for thread in threading.enumerate() if thread.name == "test-looks"]
