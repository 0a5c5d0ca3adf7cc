import io

from rich.console import Console

from mosaic.report.progress import Progress


def test_a_log_gets_one_line_for_each_phase() -> None:
    file = io.StringIO()
    with Progress(Console(file=file, width=40)) as progress:
        follow = progress.follow("profiling")
        for index in range(1000):
            follow(f"module {index}", index, 1000)
        progress.phase("solving")
        progress.advance()
    assert file.getvalue() == "profiling ...\nsolving ...\n"
