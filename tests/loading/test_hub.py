"""Downloads from a server on this machine that has the hub's HTTP API."""

import errno
import json
import re
import socket
import subprocess
import sys

import mlx.core as mx
import pytest
from hubserver import HubServer
from mlx.utils import tree_flatten
from mtp_heads import save_pair
from tinymodels import refusal, save_drafter, save_target

from dflash_mlx.errors import (
    ConfigError,
    DFlashError,
    DownloadError,
    ModelNotFoundError,
    NotEnoughMemoryError,
    WeightsError,
)
from dflash_mlx.loading.download import answer
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.load import load, load_target
from dflash_mlx.loop import generate

TARGET = "somebody/Qwen3-8B-4bit"
DRAFTER = "z-lab/Qwen3-8B-DFlash-b16"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    hub = HubServer()
    hub.repositories[TARGET] = save_target(folder / "target")
    hub.repositories[DRAFTER] = save_drafter(folder / "drafter")
    (hub.repositories[TARGET] / "pytorch_model.bin").write_bytes(b"weights in another format")
    hub.gated.add("meta-llama/Llama-3.1-8B-Instruct")
    with hub.running():
        yield hub


@pytest.fixture
def hub(server, tmp_path):
    """A client with an empty cache, and a server that remembers nothing."""
    server.requests.clear()
    server.sizes.clear()
    return Hub(server.url, tmp_path / "hub")


@pytest.fixture
def unreachable(hub):
    """A client with the same cache, and an address at which no server runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Hub(f"http://127.0.0.1:{free.getsockname()[1]}", hub.cache)


def test_a_pair_is_fetched_by_the_targets_name(hub, server):
    """The drafter is found in the registry, both are downloaded, and they decode."""
    target, drafter = load(TARGET, hub=hub)
    assert len(generate(target, drafter, [5, 6, 7], max_tokens=6).tokens) == 6
    local = load_target(str(server.repositories[TARGET]))
    tokens = mx.array([[5, 9, 2]])
    assert mx.array_equal(target.model(tokens), local.model(tokens))


def test_a_file_may_vanish_while_its_bytes_are_counted(hub):
    """The client renames its files, which the progress bar may have listed before."""
    blobs = hub.folder / f"models--{TARGET.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "vanished").symlink_to("nowhere")
    assert hub.fetch(TARGET).path.is_dir()


def test_only_the_shards_of_an_originals_mtp_head_are_fetched(hub, server, tmp_path):
    folder, _ = save_pair(tmp_path / "original", "qwen3_5")
    weights = mx.load(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    head = {name for name in weights if name.startswith("mtp.")}
    rest = sorted(weights.keys() - head)
    # The first shard has nothing of the head, the second a part of it, the third the rest of it.
    shards = [rest[::2], [*rest[1::2], *sorted(head)[:3]], sorted(head)[3:]]
    file_of = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in names})
        file_of |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    server.repositories["somebody/original"] = folder
    target, drafter = load(str(folder), draft="somebody/original", hub=hub)
    fetched = [name for name in server.fetched() if name.endswith(".safetensors")]
    assert sorted(fetched) == [f"model-0000{i}-of-00003.safetensors" for i in (2, 3)]
    _, from_original = load(str(folder), draft="mtp")
    ours, theirs = (
        dict(tree_flatten(network.parameters())) for network in (drafter, from_original)
    )
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], value) for name, value in theirs.items())


def test_only_what_is_needed_is_fetched_and_only_once(hub, server):
    hub.fetch(TARGET)
    first = server.fetched()
    assert first["model.safetensors"] == first["config.json"] == first["tokenizer.json"] == 1
    assert "pytorch_model.bin" not in first
    count = len(server.requests)
    hub.fetch(TARGET)
    assert len(server.requests) == count  # a complete copy needs no question
    hub.fetch(TARGET, update=True)
    assert server.fetched() == first and len(server.requests) > count


def test_a_disk_that_is_full_during_a_download_is_an_error_of_ours(monkeypatch):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dflash_mlx.loading.download.snapshot_download", fail)
    answered = answer({"repo_id": TARGET, "endpoint": None})
    assert answered["error"] == "DownloadError"
    assert "disk is full" in answered["message"]


def test_without_a_network_and_a_copy_the_error_says_what_to_check(unreachable):
    of_a_download = refusal(DownloadError, unreachable.fetch, TARGET)
    assert "not downloaded" in of_a_download
    of_a_question = refusal(DownloadError, unreachable.remote_bytes, TARGET)
    for text in (of_a_download, of_a_question):
        assert re.search(
            rf"annot reach {re.escape(unreachable.url)} \(.+\)\. Check the network", text
        )
        assert "proxy, or use --offline with a downloaded model." in text


def test_without_a_network_a_copy_is_used(hub, unreachable):
    folder = hub.fetch(TARGET).path
    assert unreachable.fetch(TARGET).path == folder


def test_without_a_network_an_incomplete_copy_is_an_error(hub, unreachable):
    (hub.fetch(TARGET).path / "model.safetensors").unlink()
    assert "not completely" in refusal(DownloadError, unreachable.fetch, TARGET)


def test_offline_mode_sends_no_request(hub, server):
    offline = Hub(hub.endpoint, hub.cache, offline=True)
    assert "offline" in refusal(DownloadError, offline.fetch, TARGET)
    folder = hub.fetch(TARGET).path
    server.requests.clear()
    assert offline.fetch(TARGET).path == folder
    assert not server.requests


def test_a_config_is_fetched_without_the_weights(hub, server):
    folder = hub.find(TARGET).path
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert hub.downloaded(TARGET) is None
    assert (hub.fetch(TARGET).path / "model.safetensors").is_file()


def test_the_size_of_a_download_is_that_of_its_files_once_it_is_complete(hub, server):
    assert hub.downloaded(TARGET) is None
    folder = hub.fetch(TARGET).path
    wanted = [file for file in server.repositories[TARGET].iterdir() if file.suffix != ".bin"]
    assert hub.downloaded(TARGET) == sum(file.stat().st_size for file in wanted)
    (folder / "model.safetensors").unlink()
    assert hub.downloaded(TARGET) is None


@pytest.mark.parametrize("name", ["hf.co/a/b:q8_0", "a/b:Q8_0", "a/b-GGUF"])
def test_a_gguf_file_is_fetched_alone(hub, server, tmp_path, name):
    for repository in ("a/b", "a/b-GGUF"):
        server.repositories[repository] = tmp_path
    files = ("b.Q8_0.gguf", "b.Q4_K_M-00001-of-00002.gguf", "b.Q4_K_M-00002-of-00002.gguf")
    for number, file in enumerate(files):
        (tmp_path / file).write_bytes(f"GGUF{number:012}".encode())  # 16 bytes
    expected, size = ("b.Q8_0.gguf", 16) if ":" in name else ("b.Q4_K_M-00001-of-00002.gguf", 32)
    assert hub.remote_bytes(name) == size and hub.fetch(name).path.name == expected
    assert hub.downloaded(name) == size == sum(server.fetched().values()) * 16
    with pytest.raises(WeightsError, match="a broken header"):
        load_target(name, hub=hub)
    for ask in (hub.fetch, hub.remote_bytes):
        with pytest.raises(ModelNotFoundError, match="no GGUF file in Q2_K.*TYPE: Q4_K_M, Q8_0"):
            ask("a/b:Q2_K")
    with pytest.raises(ModelNotFoundError, match="a/b has no config.json.*TYPE: Q4_K_M, Q8_0"):
        load_target("a/b", hub=hub)
    assert hub.remove(name) >= size


def test_copies_lists_all_downloads(hub):
    assert hub.copies() == {}
    for name in (TARGET, DRAFTER):
        hub.fetch(name)
    assert set(hub.copies()) == {TARGET, DRAFTER}


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("some body/model", ModelNotFoundError, "cannot be the name of a repository"),
        ("a/b..c", ModelNotFoundError, "cannot be the name of a repository"),
        ("somebody/nothing", ModelNotFoundError, "no such repository"),
        ("meta-llama/Llama-3.1-8B-Instruct", DownloadError, "is gated.*'hf auth login'"),
    ],
)
def test_repositories_that_cannot_be_fetched(hub, name, error, words):
    assert re.search(f"{name}.*{words}", refusal(error, hub.fetch, name))


@pytest.fixture
def only_config(hub, server, tmp_path):
    """Add a repository that has only a config.json and weights that must not be fetched."""

    def add(name, size=1000, **config):
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(b"x" * size)
        server.repositories[name] = folder
        return name

    return add


@pytest.mark.parametrize("model_type", ["step3p7", "glm5_next", "../qwen3"])
def test_a_target_without_a_model_is_refused_by_its_config(hub, server, only_config, model_type):
    name = only_config("somebody/new", model_type=model_type, vocab_size=512)
    for refuse in (lambda: load_target(name, hub=hub), lambda: load(name, "lookup", hub=hub)):
        with pytest.raises(ConfigError, match="cannot run it"):
            refuse()
    assert server.fetched() == {"config.json": 1}


def test_a_target_that_does_not_fit_is_refused_before_its_download(hub, server):
    server.sizes["model.safetensors"] = 10**15
    with pytest.raises(NotEnoughMemoryError, match="even quantized to 4 bits"):
        load(TARGET, hub=hub)
    assert server.fetched() == {"config.json": 1}


@pytest.mark.parametrize("drafter", [DRAFTER, "Hikari07jp/DSpark-Gemma-4-31B-draft"])
def test_another_models_drafter_is_refused_before_any_download(hub, server, only_config, drafter):
    config = json.loads((server.repositories[TARGET] / "config.json").read_text())
    name = only_config("somebody/wider", **config | {"hidden_size": 128})
    with pytest.raises(DFlashError, match="made for another target|cannot be loaded"):
        load(name, drafter, hub=hub)
    assert set(server.fetched()) == {"config.json"}


def test_a_gguf_file_is_found_without_mlx(tmp_path):
    """`use_fast_blas` comes between finding a model and loading it."""
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    code = "import sys; from dflash_mlx.loading.hub import *; find(sys.argv[1], Hub())"
    code += "; assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.gguf")], check=True)
