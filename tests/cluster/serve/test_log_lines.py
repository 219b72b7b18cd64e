"""What the processes of a cluster log can be laid beside each other: each line has its time."""

import re
import subprocess
import sys

PROGRAM = """
import logging
from holdfast.cluster.serve.log_lines import date_log_lines
date_log_lines()
logging.getLogger("holdfast.router.links.link").warning("replica %s was lost", "x")
logging.getLogger("holdfast.router.links.link").info("nobody asked")
"""


def test_a_warning_has_its_time_and_level_and_comes_once():
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stderr
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING replica x was lost\n", told)
