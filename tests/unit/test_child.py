import os

import pytest

from mosaic.child import Child
from mosaic.errors import MosaicError

ECHO = """
import os, sys

class Echo:
    def __init__(self, name):
        self.name = name

    def say(self, word, times):
        print("not an answer")
        return [self.name, word * times, os.environ.get("OMP_WAIT_POLICY")]

    def die(self):
        sys.exit(7)
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    return "echo_child:Echo"


@pytest.mark.parametrize(("passive", "policy"), [(False, None), (True, "PASSIVE")])
def test_a_child_answers_calls_and_waits_as_requested(echo, passive, policy):
    with Child(echo, "me", passive=passive) as child:
        assert child.call("say", "a", 2) == ["me", "aa", policy]
        assert child.call("say", "b", 1) == ["me", "b", policy]


def test_a_child_that_ended_is_an_error_with_its_code_and_an_error_ends_a_child(echo):
    with pytest.raises(MosaicError, match="exit code 7"), Child(echo, "me") as child:
        child.call("die")
    child = Child(echo, "me")
    child.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
