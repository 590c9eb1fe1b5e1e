"""Weights are wired, so that macOS does not page them out: when, and how many bytes."""

import mlx.core as mx
import pytest

import cli.pair
from cli.options import Names, Weights
from dflash_mlx.machine import pinned_memory

GB = 10**9


@pytest.fixture
def mac(monkeypatch):
    """Simulate a Mac with 16 GB, 10.7 of them for the GPU; return the wired limits that are set."""
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
        (14 * GB, 16 * GB, 10.4 * GB),  # 35% of the memory are not wired
        (14 * GB, 64 * GB, 10.7 * GB),  # the limit that Metal recommends
    ],
)
def test_weights_are_wired_up_to_the_limits_of_the_mac(mac, monkeypatch, weights, memory, expected):
    monkeypatch.setattr(pinned_memory, "memory_bytes", lambda: memory)
    assert pinned_memory.pin_weights(weights) == int(expected)
    assert mac == [int(expected)]


def test_nothing_is_wired_on_other_devices(monkeypatch):
    monkeypatch.setattr(mx, "set_wired_limit", None)  # a call would fail
    assert pinned_memory.pin_weights(5 * GB) == 0


@pytest.mark.parametrize(("settings", "count"), [({}, 1), ({"wire": False}, 0)])
def test_opening_a_pair_wires_its_weights(monkeypatch, settings, count):
    """It wires the bytes that loading has added, once, unless `wire` is False."""
    wired: list[int] = []
    monkeypatch.setattr(pinned_memory, "pin_weights", wired.append)
    pair = cli.pair.open_pair(Names("tiny"), Weights(), warm=False, **settings)
    assert len(wired) == count
    assert all(0 < size < 2 * mx.get_active_memory() for size in wired)
    assert pair.target is not None
