"""A cache's folder: hits outlast the process, and nothing that goes wrong there is an error."""

import io
import os
import resource
import subprocess
import sys
import warnings
from contextlib import contextmanager

import mlx.core as mx
import prefixes
import pytest
from prefixes import CHUNK, Drafter, Target, request, store
from test_prefix import KINDS, pair, text

from dflash_mlx.errors import OutputError
from dflash_mlx.prefix.disk_cache import NAME
from dflash_mlx.prefix.disk_cache import _name as checked_name
from dflash_mlx.prefix.entries import Location


def files(folder):
    return sorted((folder / "prefix").iterdir())


def bytes_in(folder):
    return sum(file.stat().st_size for file in files(folder))


def filled(folder, *texts, kind=(True, True), **settings):
    """A folder that a store has left, which read these texts."""
    here = store(*pair(kind), folder=folder, **settings)
    for ids in texts:
        request(here, ids)
    here.flush()
    return here


@KINDS
def test_hits_outlast_the_store(kind, tmp_path):
    prompt = text(50)
    filled(tmp_path, prompt, kind=kind)
    again = store(*pair(kind), folder=tmp_path)
    assert request(again, [*prompt, *text(9, 1)]) == (50 if kind != (True, True) else 48)
    assert again.used > 0  # and it is in memory now
    again._disk = None
    assert request(again, [*prompt, *text(9, 2)]) >= 48


def test_a_program_that_ends_has_written_all(tmp_path):
    """Nobody waited for the writer, and another process finds it all."""
    code = (
        "import prefixes, test_prefix, sys;"
        "here = prefixes.store(prefixes.Target(False), folder=sys.argv[1]);"
        "prefixes.request(here, test_prefix.text(400))"
    )
    folders = [os.path.dirname(__file__), os.path.dirname(prefixes.__file__)]
    tests = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=tests)
    assert (done.returncode, done.stderr) == (0, "")
    assert request(store(Target(False), folder=tmp_path), [*text(400), 1, 2, 3]) == 400


def flip(file, others):
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)


def empty(file, others):
    os.truncate(file, 0)


def rename(file, others):
    file.unlink()
    others[0].rename(file)


def rewritten(file, data):
    """Other content, under a name whose checksum fits it."""
    named = NAME.fullmatch(file.name)
    location = named["block"] and Location(bytes.fromhex(named["block"]), int(named["length"]))
    file.unlink()
    name = checked_name(bytes.fromhex(named["key"]), location, data)
    file.with_name(name).write_bytes(data)


def other_arrays(change):
    """Damage of a file: the arrays that `change` makes of its own."""

    def damage(file, others):
        buffer = io.BytesIO()
        (arrays, metadata) = mx.load(str(file), return_metadata=True)
        changed = {name: y for name, x in arrays.items() for y in change(x)}
        mx.save_safetensors(buffer, changed, metadata)
        rewritten(file, buffer.getvalue())

    return damage


def pipe(file, others):
    file.unlink()
    os.mkfifo(file)


def endless(file, others):
    file.unlink()
    file.symlink_to("/dev/zero")


def large(file, others):
    os.truncate(file, 2**40)  # takes no room


missing = other_arrays(lambda x: [])
longer = other_arrays(lambda x: [mx.concatenate([x, x])])
floats = other_arrays(lambda x: [x.astype(mx.float32)])


def remove(file, others):
    file.unlink()


DAMAGES = [flip, empty, rename, remove, pipe, endless, large, missing, longer, floats]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["block", "checkpoint"])
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_damaged_file_is_a_miss(damage, which, when, tmp_path):
    """Before the store begins, and while it runs. The text before it is still found."""
    prompt = text(50)
    here = filled(tmp_path, prompt, kind=(False, True))
    by_kind = {"-".join(file.name.split("-")[:2]): file for file in files(tmp_path)}
    order = [by_kind.get(f"{which}-{key.hex()}") for key in here._disk._files]
    ours = [file for file in order if file is not None]
    if which == "checkpoint":
        ours.reverse()  # of blocks the last ones go first, of checkpoints the earlier ones
    damage(ours[0], ours[1:])
    if when == "before":
        here = store(Target(False), folder=tmp_path)
    here.clear()
    assert 0 < request(here, [*prompt, 1, 2]) < 49
    for _ in range(2):  # a bad file that nobody asked for is still there the first time
        here.flush()
        here = store(Target(False), folder=tmp_path)
        held = request(here, [*prompt, 1, 2, 3, 4])
    assert held == 52  # it is mended


@contextmanager
def no_file_above(size):
    """The system refuses to write more than so many bytes into a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_a_miss_and_one_line(tmp_path):
    here = store(Target(False), folder=tmp_path)
    with warnings.catch_warnings(record=True) as said, no_file_above(64):
        warnings.simplefilter("always")
        for seed in range(3):
            request(here, text(30, seed))
        here.flush()
    (line,) = [str(warning.message) for warning in said]
    assert "prefixes are not kept on disk" in line and "\n" not in line
    assert files(tmp_path) == []
    assert request(here, [*text(30), 1, 2]) == 30  # of memory; now the disk has room again
    request(here, text(30, 9))
    here.flush()
    assert request(store(Target(False), folder=tmp_path), [*text(30, 9), 1, 2]) == 30


def test_a_disk_without_free_room_is_left_alone_and_said_at_once(tmp_path):
    with pytest.warns(UserWarning, match="have to stay free; choose another place") as said:
        here = store(Target(), folder=tmp_path, disk_left=2**60)
        assert len(said) == 1
        request(here, text(30))
        here.flush()
    assert len(said) == 1
    assert files(tmp_path) == []


def test_the_folder_keeps_its_budget_and_what_was_used_last(tmp_path):
    first, second, third = (text(8 * CHUNK + 3, seed) for seed in range(3))
    room = bytes_in(filled(tmp_path / "one", first).flush() or tmp_path / "one")
    settings = {"folder": tmp_path / "two", "disk": 2 * room}
    for ids, held in ((first, 0), (second, 0), (first, 32), (third, 0), (first, 32), (third, 32)):
        here = store(Target(), **settings)  # what was used last is known from the files' times
        assert request(here, ids) == held
        here.flush()
        assert bytes_in(tmp_path / "two") <= 2 * room
    assert request(store(Target(), **settings), second) == 0


def test_the_folder_is_for_one_user_and_other_files_are_not_touched(tmp_path):
    (tmp_path / "notes").write_text("mine")
    os.chmod(tmp_path, 0o755)
    filled(tmp_path, text(30))
    (tmp_path / "prefix" / "notes.safetensors").write_text("mine")
    left = tmp_path / "prefix" / f".{'a' * 64}.1"
    fresh = left.with_name(f".{'b' * 64}.1")
    left.write_text("")
    fresh.write_text("")
    os.utime(left, (0, 0))
    filled(tmp_path, text(40))
    assert (tmp_path / "prefix").stat().st_mode & 0o777 == 0o700
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    names = {file.name: file for file in files(tmp_path)}
    assert {"notes.safetensors", fresh.name} <= set(names) and left.name not in names
    entries = [file for name, file in names.items() if name.startswith(("block", "checkpoint"))]
    assert {file.stat().st_mode & 0o777 for file in entries} == {0o600}


def test_an_unusable_folder_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another path"):
        store(Target(), Drafter(), folder=tmp_path / "file")
