"""What worker processes of our own Ray import at their start (`spare_process.py`). Nothing else may import it."""

from holdfast.cluster.serve.spare_process import load_if_idle

load_if_idle()
