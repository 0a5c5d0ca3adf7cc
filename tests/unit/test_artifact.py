import errno
import os

import pytest

from mosaic import artifact
from mosaic.device import Device
from mosaic.errors import InvalidFileError, InvalidPlanError, MosaicError
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.plan import Plan, plan_from_quotas

DEVICE = Device(name="two cores", kind="host", num_slots=2)
GRAPH = ModuleGraph(modules=(ModuleNode(name="image"), ModuleNode(name="text")))
PLAN = plan_from_quotas([{"image": 1, "text": 1}], graph=GRAPH, device=DEVICE)
TEXT = artifact.to_json(PLAN)


def refused(text, *fragments, error=InvalidFileError):
    with pytest.raises(error) as caught:
        artifact.parse(Plan, text, source="plan.json")
    message = str(caught.value)
    for fragment in ("plan.json", *fragments):
        assert fragment in message, message


def test_a_plan_survives_its_file(tmp_path):
    path = tmp_path / "deep" / "plan.json"
    artifact.save(PLAN, path)
    assert artifact.load(Plan, path) == PLAN
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("share", [0.1, 0.99])
def test_a_truncated_file_is_refused_with_the_line(share):
    cut = TEXT.rstrip()[: int(len(TEXT.rstrip()) * share)]
    refused(cut, "EOF while parsing", f"line {cut.count(chr(10)) + 1}")


def test_a_wrong_value_deep_inside_is_refused_with_its_place():
    first, second, third = TEXT.partition('"forward_ms": 0.0')
    assert third
    refused(
        first + second + third.replace(": 0.0", ": -1.0", 6),
        "stages.0.placements.0.backward_ms",
        "greater than or equal to 0",
        "(and 3 more)",
    )


def test_an_unknown_field_is_refused():
    refused(TEXT.replace('"num_devices"', '"num_devises": 4, "num_devices"'), "num_devises: Unexpected keyword")


def test_a_newer_schema_is_refused_with_the_way_out():
    refused(TEXT.replace('"schema_version": 4', '"schema_version": 7'), "schema_version=7", "upgrade")


def test_a_rule_of_the_plan_itself_names_the_file():
    broken = TEXT.replace('"slots": [\n            1\n          ]', '"slots": [\n            5\n          ]')
    assert broken != TEXT
    refused(broken, "slots 0 to 1", error=InvalidPlanError)


def test_an_unwritable_folder_is_an_error_that_names_it(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(MosaicError, match="choose a folder that can be written"):
        artifact.save(PLAN, blocker / "plan.json")


def test_a_link_stays_a_link_to_what_was_written(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    artifact.write_text("new", link)
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_full_disk_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("the old one")

    def full(_handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MosaicError, match="No space left on device"):
        artifact.save(PLAN, path)
    assert path.read_text() == "the old one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
