"""What the processes of a cluster log can be laid beside each other: each line has its time."""

import json
import logging
import re
import subprocess
import sys

from holdfast.cluster.serve.log_files import JsonFormatter

PROGRAM = """
import logging
from holdfast.cluster.serve.log_files import date_log_lines
date_log_lines()
logging.getLogger("holdfast.router.links.replica_link").warning("replica %s was lost", "x")
logging.getLogger("holdfast.router.links.replica_link").info("nobody asked")
"""


def test_a_warning_has_its_time_and_level_and_comes_once():
    message = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stderr
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING replica x was lost\n", message)


def test_a_line_in_json_has_the_requests_id_and_the_stack_without_what_the_exception_says():
    try:
        raise ValueError("what a user has sent: sec" + "ret")
    except ValueError:
        record = logging.getLogger("holdfast.x").makeRecord(
            "holdfast.x", logging.ERROR, "f", 1, "request %s failed", ("r1",), sys.exc_info(),
            extra={"details": {"request_id": "r1", "level": "cannot be overwritten"}},
        )  # fmt: skip
    line = JsonFormatter().format(record)
    message = json.loads(line)
    assert (message["level"], message["message"], message["request_id"]) == ("error", "request r1 failed", "r1")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", message["time"])
    assert message["exception"].endswith("builtins.ValueError")
    assert "secret" not in line
    assert "\n" not in line


def test_the_setting_decides_the_format():
    program = PROGRAM.replace("date_log_lines()", "date_log_lines('json')")
    message = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert json.loads(message)["message"] == "replica x was lost"
