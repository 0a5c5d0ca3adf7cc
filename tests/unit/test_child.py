import os

import pytest

from mosaic.child import Child
from mosaic.errors import MosaicError

ECHO = """
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    if request == {"die": True}:
        sys.exit(7)
    print(json.dumps({"got": request, "policy": os.environ.get("OMP_WAIT_POLICY"), "for": sys.argv[1]}), flush=True)
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    return "echo_child"


def test_a_child_answers_each_request_and_waits_as_torch_does(echo):
    with Child(echo, "me") as child:
        assert child.ask({"a": 1}) == {"got": {"a": 1}, "policy": None, "for": "me"}
        assert child.ask({"a": 2})["got"] == {"a": 2}


def test_a_child_that_ended_is_an_error_with_its_code(echo):
    with pytest.raises(MosaicError, match="exit code 7"), Child(echo, "me") as child:
        child.ask({"die": True})


def test_a_child_ends_with_its_block_also_after_an_error(echo):
    child = Child(echo, "me")
    child.__enter__()
    child.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
