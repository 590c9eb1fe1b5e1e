"""`dflash-mlx doctor`: what it says of a machine where something is missing or in the way."""

import json
import shutil
import subprocess
import sys
from collections import namedtuple

import mlx.core as mx
import pytest
from program import HERE, start
from typer.testing import CliRunner
from webserver import web_server

import dflash_mlx
from dflash_mlx.cli import doctor
from dflash_mlx.cli.app import app
from dflash_mlx.loading.hub import Hub
from dflash_mlx.machine.blas import BlasInfo

NAMES = "Python packages disk hub chip g++ BLAS".split()
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def checks(monkeypatch):
    """Run the command in this process: its exit code, and its checks by name."""
    blas = BlasInfo("dflash-avx2", None, "made up")
    monkeypatch.setattr(dflash_mlx, "use_fast_blas", lambda stock: blas)
    monkeypatch.setattr(doctor, "_check_pair", lambda: doctor.Check("embedded pair", "ok", ""))

    def look(*options: str):
        done = CliRunner().invoke(app, ["doctor", "--json", *options], prog_name="dflash-mlx")
        content = json.loads(done.stdout)
        checks = {check["name"]: check for check in content["checks"]}
        assert content["ok"] == (done.exit_code == 0)
        assert all(check["advice"] for check in checks.values() if check["status"] != "ok")
        return done.exit_code, checks

    return look


def test_what_is_checked():
    done = start("doctor", "--json", "--offline")
    content = json.loads(done.stdout)
    assert done.returncode == 0 and content["ok"] and not done.stderr
    status = {check["name"]: check["status"] for check in content["checks"]}
    assert list(status)[: len(NAMES) + 1] == [*NAMES, "embedded pair"]
    assert {status[name] for name in ("Python", "packages", "embedded pair")} == {"ok"}
    pair = content["checks"][len(NAMES)]["detail"]
    assert pair.startswith("16 tokens identical to plain")
    assert pair.endswith("steps are built once per shape and replayed")


def test_without_mlx():
    code = "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None;"
    code += "from dflash_mlx.cli import doctor; doctor.installed = lambda name: None;"
    code += "from dflash_mlx.cli.app import app; app(['doctor', '--offline'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 1 and 'pip install -e ".[mlx]"' in done.stdout and not done.stderr


@pytest.mark.parametrize(
    "versions, name, status",
    [
        ({"mlx": None}, "packages", "fail"),
        ({"mlx-lm": "99.0"}, "packages", "warn"),
        ({"numpy": "1.0"}, "packages", "warn"),
        ({}, "packages", "ok"),
    ],
)
def test_packages(versions, name, status, checks, monkeypatch):
    installed = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: versions.get(name, installed(name)))
    code, said = checks("--offline")
    assert said[name]["status"] == status and code == (status == "fail")
    assert ("chip" in said) == (status != "fail")
    assert ("numpy 1.0, needs" in said["packages"]["detail"]) == ("numpy" in versions)


def test_little_disk(checks, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**9))
    code, said = checks("--offline")
    assert code == 0 and said["disk"]["status"] == "warn"
    assert said["disk"]["detail"].startswith("1 GB free")


def test_a_place_for_downloads_that_cannot_be_used(checks, monkeypatch, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    monkeypatch.setattr(doctor, "Hub", lambda offline: Hub(cache=loop / "hub", offline=True))
    code, said = checks("--offline")
    assert code == 0 and said["disk"]["status"] == "warn"
    assert said["disk"]["detail"] == f"{loop / 'hub'}: Too many levels of symbolic links"


@pytest.mark.parametrize("answers", [True, False])
def test_the_hub(answers, checks, monkeypatch):
    """A hub that answers with an error is still reachable."""
    with web_server(lambda _: (405, [], {})) as url:
        local = Hub(endpoint=url if answers else "http://127.0.0.1:9")
        monkeypatch.setattr(doctor, "Hub", lambda offline: local)
        code, said = checks()
    assert code == 0
    assert said["hub"]["status"] == ("ok" if answers else "warn")
    assert local.url in said["hub"]["detail"]


@pytest.mark.parametrize(
    "chip, status, words",
    [
        ("Apple M5", "ok", "models and caches may take 1.0 GB; each model's first load times"),
        ("Apple M99", "warn", "unknown"),
    ],
)
def test_kernels_by_chip(chip, status, words, checks, monkeypatch):
    monkeypatch.setattr("dflash_mlx.loading.reading.on_cpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    device = {"device_name": chip, "max_recommended_working_set_size": 10**9}
    monkeypatch.setattr(mx, "device_info", lambda: device)
    _, said = checks("--offline")
    assert said["chip"]["status"] == status and words in said["chip"]["detail"]
    assert said["chip"]["detail"].startswith(chip)


def test_a_cuda_card(checks, monkeypatch):
    monkeypatch.setattr("dflash_mlx.loading.reading.on_cpu", lambda: False)
    card = {"device_name": "NVIDIA H100", "total_memory": 80 * 10**9}
    monkeypatch.setattr(mx, "device_info", lambda: card)
    _, said = checks("--offline")
    assert said["chip"]["detail"].endswith("80.0 GB; MLX decodes on CUDA")
    assert not said.keys() & {"BLAS", "g++"}  # of the CPU
