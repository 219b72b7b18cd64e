import io

import pytest
from rich.console import Console

from cluster.chunks import Chunk
from cluster.demo.run import LinePrinter, Stream
from worker.request import FinishReason


def chunk(text: str, num_tokens: int, finish_reason: FinishReason | None = None) -> Chunk:
    return Chunk(
        request_id="r", first_token_index=0, token_ids=(1,) * num_tokens, text=text, finish_reason=finish_reason
    )


def test_figures_come_from_the_times_of_the_tokens():
    stream = Stream(1, "prompt", started_s=10.0)
    stream.take(chunk("a", 1), 10.5)
    stream.take(chunk("bc", 2), 11.0)
    stream.take(chunk("d", 1, FinishReason.LENGTH), 12.0)
    assert stream.text == "abcd"
    assert stream.num_tokens == 4
    assert stream.first_token_s == pytest.approx(0.5)
    assert stream.per_token_s == pytest.approx(0.5)
    assert stream.tokens_per_s == pytest.approx(2.0)


def test_without_a_terminal_a_stream_is_shown_by_the_line_and_at_its_end():
    shown = io.StringIO()
    printer = LinePrinter(Console(file=shown))
    stream = Stream(3, "The")
    for number in range(30):
        stream.take(chunk(" x", 1, FinishReason.STOP if number == 29 else None), float(number))
        printer.show([stream], stream)
    lines = shown.getvalue().splitlines()
    assert [line.count(" x") for line in lines] == [12, 24, 30]
    assert all(line.startswith("[3]") and "The x" in line for line in lines)
