import io

import pytest
from rich.console import Console

from holdfast.cluster.demo.run import Loss
from holdfast.cluster.demo.streams import LinePrinter, Stream
from holdfast.router.generation import OutputDelta
from holdfast.worker.request import FinishReason


def chunk(text: str, num_tokens: int, finish_reason: FinishReason | None = None) -> OutputDelta:
    return OutputDelta(
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


def streamed(number: int, *pieces: tuple[float, int]) -> Stream:
    stream = Stream(number, "prompt")
    for at_s, token_id in pieces:
        text = f"{token_id} "
        stream.take(
            OutputDelta(request_id="r", first_token_index=0, token_ids=(token_id,), text=text, finish_reason=None), at_s
        )
    return stream


def test_a_loss_shows_who_paused_and_who_changed():
    before = [streamed(1, (0, 5)), streamed(2, (0, 5), (1, 6), (2, 7)), streamed(3, (0, 5), (1, 6))]
    after = [streamed(1, (0, 5)), streamed(2, (0, 5), (1, 6), (4, 7)), streamed(3, (0, 5), (3, 8))]
    loss = Loss(pid=77, at_s=1.5, streams=after)
    shown = io.StringIO()
    Console(file=shown).print(loss.table(before))
    rows = [line.split("│")[1:-1] for line in shown.getvalue().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["1", "1", "had ended", "identical"],
        ["2", "3", "3000 ms", "identical"],
        ["3", "2", "3000 ms", "DIFFERENT"],
    ]
    assert not loss.is_unseen(before)
    assert loss.is_unseen(after)
