"""Weights that macOS does not page out: how many bytes, and on whose account."""

import mlx.core as mx
import pytest

import cli.pair
from cli.options import Names, Weights
from dflash_mlx.machine import pinned_memory

GB = 10**9


@pytest.fixture
def mac(monkeypatch):
    """A Mac's device of 16 GB, of which the GPU should have 10.7; the limits that were set."""
    limits: list[int] = []
    info = {"max_recommended_working_set_size": 10.7 * GB}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    monkeypatch.setattr(pinned_memory, "memory_bytes", lambda: 16 * GB)
    return limits


@pytest.mark.parametrize(
    ("weights", "memory", "expected"),
    [
        (5 * GB, 16 * GB, 5 * GB),  # the weights and no more
        (14 * GB, 16 * GB, 10.4 * GB),  # 35% stay pageable
        (14 * GB, 64 * GB, 10.7 * GB),  # what the GPU should have
    ],
)
def test_weights_are_wired_as_far_as_the_mac_can(mac, monkeypatch, weights, memory, expected):
    monkeypatch.setattr(pinned_memory, "memory_bytes", lambda: memory)
    assert pinned_memory.pin_weights(weights) == int(expected)
    assert mac == [int(expected)]


def test_other_devices_wire_nothing(monkeypatch):
    monkeypatch.setattr(mx, "set_wired_limit", None)
    assert pinned_memory.pin_weights(5 * GB) == 0


@pytest.mark.parametrize(("settings", "count"), [({}, 1), ({"wire": False}, 0)])
def test_opening_a_pair_wires_its_weights(monkeypatch, settings, count):
    """Once, by what loading added; not in a server that was not asked to."""
    calls: list[int] = []
    monkeypatch.setattr(pinned_memory, "pin_weights", calls.append)
    pair = cli.pair.open_pair(Names("tiny"), Weights(), warm=False, **settings)
    assert len(calls) == count
    assert all(0 < held < 2 * mx.get_active_memory() for held in calls)
    assert pair.target is not None
