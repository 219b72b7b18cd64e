import io

from holdfast.cluster.progress_bars import PlainProgress


def shown(*reports: tuple[str, int, int]) -> list[str]:
    stream = io.StringIO()
    clock = iter(range(100))
    plain = PlainProgress(stream, clock=lambda: float(next(clock)))
    for report in reports:
        plain.report(*report)
    return stream.getvalue().splitlines()


def test_a_phase_is_one_line_at_its_start_and_one_at_its_end():
    assert shown(("weights", 0, 3), ("weights", 1, 3), ("weights", 3, 3)) == ["weights ...", "weights: done in 1.0 s"]


def test_an_ended_phase_is_not_told_again():
    assert len(shown(("weights", 0, 1), ("weights", 1, 1), ("weights", 1, 1))) == 2


def test_phases_that_overlap_are_kept_apart():
    lines = shown(("a", 0, 1), ("b", 0, 1), ("b", 1, 1), ("a", 1, 1))
    assert lines == ["a ...", "b ...", "b: done in 1.0 s", "a: done in 3.0 s"]
