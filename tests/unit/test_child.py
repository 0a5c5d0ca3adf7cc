import os
from contextlib import suppress

import pytest

from mosaic.child import child
from mosaic.errors import MosaicError

ECHO = """
import os, sys

class Echo:
    def __init__(self, name):
        self.name = name

    def say(self, word, times):
        print("not an answer")
        return [self.name, word * times, os.environ.get("OMP_WAIT_POLICY")]

    def pid(self):
        return os.getpid()

    def die(self):
        sys.exit(7)
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    return "echo_child:Echo"


@pytest.mark.parametrize(("waiting", "policy"), [("by OpenMP's default", None), ("passively", "PASSIVE")])
def test_a_child_answers_calls_and_waits_as_requested(echo, waiting, policy):
    with child(echo, "me", waiting) as call:
        assert call("say", "a", 2) == ["me", "aa", policy]
        assert call("say", "b", 1) == ["me", "b", policy]


def test_a_child_that_ended_is_an_error_with_its_code_and_an_error_ends_a_child(echo):
    with child(echo, "me", "passively") as call:
        pid = call("pid")
        for _ in range(2):
            with pytest.raises(MosaicError, match="exit code 7"):
                call("die")
    with suppress(KeyboardInterrupt), child(echo, "me", "passively") as call:
        pid = call("pid")
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
