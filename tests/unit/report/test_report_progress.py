import io

from rich.console import Console

from mosaic.report.progress import Progress


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def log() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=40), file


def test_a_log_gets_at_most_one_line_in_five_seconds() -> None:
    console, file = log()
    clock = Clock()
    with Progress(console, clock=clock) as progress:
        progress.phase("profiling", total=1000)
        for index in range(1000):
            clock.now += 0.011
            progress.advance(note=f"module {index}")
    assert len(file.getvalue().splitlines()) == 3
