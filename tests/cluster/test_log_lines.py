"""What the processes of a cluster log can be laid beside each other: each line has its time."""

import re
import subprocess
import sys

PROGRAM = """
import logging
from cluster.log_lines import date_log_lines
date_log_lines()
logging.getLogger("router.link").warning("replica %s was lost", "x")
logging.getLogger("router.link").info("nobody asked")
"""


def test_a_warning_has_its_time_and_level_and_comes_once():
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stderr
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING replica x was lost\n", told)
