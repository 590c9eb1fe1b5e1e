"""`dflash-mlx doctor`: what it reports when something on the machine is missing or wrong."""

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
    """A function that runs the command, and returns its exit code and its checks by name."""
    blas = BlasInfo("dflash-avx2", None, "made up")
    monkeypatch.setattr(dflash_mlx, "use_fast_blas", lambda stock: blas)
    monkeypatch.setattr(doctor, "_check_pair", lambda: doctor.Check("embedded pair", "ok", ""))

    def run_doctor(*options: str):
        done = CliRunner().invoke(app, ["doctor", "--json", *options], prog_name="dflash-mlx")
        content = json.loads(done.stdout)
        checks = {check["name"]: check for check in content["checks"]}
        assert content["ok"] == (done.exit_code == 0)
        assert all(check["advice"] for check in checks.values() if check["status"] != "ok")
        return done.exit_code, checks

    return run_doctor


def test_all_checks_of_this_machine_pass():
    done = start("doctor", "--json", "--offline")
    content = json.loads(done.stdout)
    assert done.returncode == 0 and content["ok"] and not done.stderr
    status = {check["name"]: check["status"] for check in content["checks"]}
    assert list(status)[: len(NAMES) + 1] == [*NAMES, "embedded pair"]
    assert {status[name] for name in ("Python", "packages", "embedded pair")} == {"ok"}
    pair = content["checks"][len(NAMES)]["detail"]
    assert pair.startswith("16 tokens identical to plain")
    assert pair.endswith("steps of one shape share a graph")


def test_without_mlx_it_says_what_to_install():
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
def test_missing_packages_fail_and_unsupported_versions_warn(
    versions, name, status, checks, monkeypatch
):
    installed = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: versions.get(name, installed(name)))
    code, reported = checks("--offline")
    failed = status == "fail"
    assert reported[name]["status"] == status and code == failed
    assert ("chip" in reported) == (not failed), "without MLX the chip is not known"
    assert ("numpy 1.0, needs" in reported["packages"]["detail"]) == ("numpy" in versions)


def test_a_nearly_full_disk_is_a_warning(checks, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**9))
    code, reported = checks("--offline")
    assert code == 0 and reported["disk"]["status"] == "warn"
    assert reported["disk"]["detail"].startswith("1 GB free")


def test_an_unusable_download_folder_is_a_warning(checks, monkeypatch, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    monkeypatch.setattr(doctor, "Hub", lambda offline: Hub(cache=loop / "hub", offline=True))
    code, reported = checks("--offline")
    assert code == 0 and reported["disk"]["status"] == "warn"
    assert reported["disk"]["detail"] == f"{loop / 'hub'}: Too many levels of symbolic links"


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_that_answers_is_reachable(answers, checks, monkeypatch):
    """Even if it answers with an error."""
    with web_server(lambda _: (405, [], {})) as url:
        nobody_listens = "http://127.0.0.1:9"
        hub = Hub(endpoint=url if answers else nobody_listens)
        monkeypatch.setattr(doctor, "Hub", lambda offline: hub)
        code, reported = checks()
    assert code == 0
    assert reported["hub"]["status"] == ("ok" if answers else "warn")
    assert hub.url in reported["hub"]["detail"]


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
    _, reported = checks("--offline")
    assert reported["chip"]["status"] == status and words in reported["chip"]["detail"]
    assert reported["chip"]["detail"].startswith(chip)


def test_a_cuda_card_is_named_with_its_memory(checks, monkeypatch):
    monkeypatch.setattr("dflash_mlx.loading.reading.on_cpu", lambda: False)
    card = {"device_name": "NVIDIA H100", "total_memory": 80 * 10**9}
    monkeypatch.setattr(mx, "device_info", lambda: card)
    _, reported = checks("--offline")
    assert reported["chip"]["detail"].endswith("80.0 GB; MLX decodes on CUDA")
    assert not reported.keys() & {"BLAS", "g++"}, "which only matter on the CPU"
