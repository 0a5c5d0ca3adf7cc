"""Devices and clusters by name and by file."""

from __future__ import annotations

import json

import pytest

from mosaic.artifact import save, to_json
from mosaic.device import Device
from mosaic.errors import InvalidFileError, MosaicError
from mosaic.hardware import HARDWARE_NAMES, find_cluster, find_hardware, hardware_of

H100 = find_hardware("h100-80g")


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_every_name_gives_a_device_with_slots_and_a_source(name: str):
    hardware = find_hardware(name)
    device = hardware.device()
    assert device.num_slots >= 1
    assert device.num_slots * device.sms_per_slot + device.remainder_sms == hardware.num_sms
    assert hardware.source
    assert find_cluster(name).num_devices == 1


def test_a_description_survives_its_file(tmp_path):
    path = tmp_path / "mine.json"
    save(H100, path)
    assert find_hardware(str(path)) == H100
    assert find_cluster(str(path)).hardware == H100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_gb_per_s": 0}, "memory_gb_per_s=0.*use a finite number above 0"),
        ({"num_sms": None}, "num_sms"),
        ({"sms_per_slot": 200}, "sms_per_slot=200 exceeds num_sms=132"),
        ({"efficiency": {"conv": 2.5}}, "efficiency.conv=2.5; use above 0 and at most 2"),
        ({"tensor_cores": 4}, "tensor_cores"),
    ],
)
def test_a_broken_description_is_refused_by_its_file_and_field(tmp_path, changes: dict, words: str):
    raw = {name: value for name, value in (json.loads(to_json(H100)) | changes).items() if value is not None}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(InvalidFileError, match=f"(?s)mine.json.*{words}"):
        find_hardware(str(path))


def test_a_cluster_comes_from_a_file(tmp_path):
    path = tmp_path / "cluster.json"
    raw = {
        "schema_version": 1,
        "hardware": "a40",
        "nodes": 6,
        "gpus_per_node": 4,
        "nics_per_node": 1,
        "intra_node": {"gb_per_s": 32},
        "inter_node": {"gb_per_s": 25, "latency_us": 14, "ll_us": 5},
    }
    path.write_text(json.dumps(raw))
    cluster = find_cluster(str(path))
    assert (cluster.num_devices, cluster.hardware.name, cluster.inter_node.gb_per_s) == (24, "a40", 25)
    assert find_cluster(str(path), 24) == cluster
    with pytest.raises(MosaicError, match="describes 24 devices; leave out"):
        find_cluster(str(path), 8)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_gpu_is_found_by_its_product_name(product: str, name: str | None):
    hardware = hardware_of(Device(name=product, kind="cuda", num_slots=16))
    assert (hardware.name if hardware is not None else None) == name
