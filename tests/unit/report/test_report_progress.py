import io

from rich.console import Console

from mosaic.report.progress import Progress


def test_a_log_gets_at_most_one_line_in_five_seconds() -> None:
    now, file = [100.0], io.StringIO()
    with Progress(Console(file=file, width=40), clock=lambda: now[0]) as progress:
        progress.phase("profiling", total=1000)
        for index in range(1000):
            now[0] += 0.011
            progress.advance(note=f"module {index}")
    lines = file.getvalue().splitlines()
    assert lines[0] == "[0 s] profiling ... 0/1000"
    assert [line.partition(" left")[1] for line in lines] == ["", " left", " left"]
