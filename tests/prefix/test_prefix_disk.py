"""A prefix store's folder: prefixes are found in later processes, and damage is never an error."""

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


def filled_store(folder, *texts, kind=(True, True), **settings):
    """A store that has read some texts and written them to its folder."""
    here = store(*pair(kind), folder=folder, **settings)
    for ids in texts:
        request(here, ids)
    here.flush()
    return here


@KINDS
def test_a_prefix_is_found_by_a_later_store_and_then_in_memory(kind, tmp_path):
    prompt = text(50)
    filled_store(tmp_path, prompt, kind=kind)
    later = store(*pair(kind), folder=tmp_path)
    # A folder has whole chunks of 4 tokens, and the rows up to a checkpoint where one is needed.
    assert request(later, [*prompt, *text(9, 1)]) == (50 if kind != (True, True) else 48)
    assert later.used > 0
    later._disk = None
    assert request(later, [*prompt, *text(9, 2)]) >= 48


def test_a_program_writes_all_prefixes_before_it_ends(tmp_path):
    """Without calling `flush`; another process finds them."""
    code = (
        "import prefixes, test_prefix, sys;"
        "here = prefixes.store(prefixes.Target(False), folder=sys.argv[1]);"
        "prefixes.request(here, test_prefix.text(400))"
    )
    folders = [os.path.dirname(__file__), os.path.dirname(prefixes.__file__)]
    tests = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=tests)
    assert (result.returncode, result.stderr) == (0, "")
    assert request(store(Target(False), folder=tmp_path), [*text(400), 1, 2, 3]) == 400


# Ways to damage a file. `others` are further files of its kind.


def flip_a_bit(file, others):
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)


def empty(file, others):
    os.truncate(file, 0)


def replace_by_another(file, others):
    file.unlink()
    others[0].rename(file)


def rewrite(file, data):
    """Replace a file's content, with a name that has the new content's checksum."""
    parts = NAME.fullmatch(file.name)
    location = parts["block"] and Location(bytes.fromhex(parts["block"]), int(parts["length"]))
    file.unlink()
    name = checked_name(bytes.fromhex(parts["key"]), location, data)
    file.with_name(name).write_bytes(data)


def rewrite_arrays(file, arrays, metadata):
    buffer = io.BytesIO()
    mx.save_safetensors(buffer, arrays, metadata)
    rewrite(file, buffer.getvalue())


def without_arrays(file, others):
    _, metadata = mx.load(str(file), return_metadata=True)
    rewrite_arrays(file, {}, metadata)


def with_longer_arrays(file, others):
    arrays, metadata = mx.load(str(file), return_metadata=True)
    longer = {name: mx.concatenate([array, array]) for name, array in arrays.items()}
    rewrite_arrays(file, longer, metadata)


def with_float_arrays(file, others):
    arrays, metadata = mx.load(str(file), return_metadata=True)
    floats = {name: array.astype(mx.float32) for name, array in arrays.items()}
    rewrite_arrays(file, floats, metadata)


def replace_by_pipe(file, others):
    file.unlink()
    os.mkfifo(file)


def replace_by_endless_device(file, others):
    file.unlink()
    file.symlink_to("/dev/zero")


def enlarge(file, others):
    os.truncate(file, 2**40)  # a sparse file, which takes no space


def remove(file, others):
    file.unlink()


DAMAGES = [
    flip_a_bit,
    empty,
    replace_by_another,
    remove,
    replace_by_pipe,
    replace_by_endless_device,
    enlarge,
    without_arrays,
    with_longer_arrays,
    with_float_arrays,
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["block", "checkpoint"])
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_damaged_file_is_a_miss_and_is_replaced(damage, which, when, tmp_path):
    """If it is damaged before a store opens or while it runs. The text before it is still found."""
    prompt = text(50)
    here = filled_store(tmp_path, prompt, kind=(False, True))
    files_by_key = {"-".join(file.name.split("-")[:2]): file for file in files(tmp_path)}
    ordered = [files_by_key.get(f"{which}-{key.hex()}") for key in here._disk._files]
    of_this_kind = [file for file in ordered if file is not None]
    if which == "checkpoint":
        of_this_kind.reverse()  # blocks are ordered from the text's end, checkpoints from its start
    damage(of_this_kind[0], of_this_kind[1:])
    if when == "before":
        here = store(Target(False), folder=tmp_path)
    here.clear()
    assert 0 < request(here, [*prompt, 1, 2]) < 49
    for _ in range(2):  # after one request, a damaged file that it did not read may remain
        here.flush()
        here = store(Target(False), folder=tmp_path)
        reused = request(here, [*prompt, 1, 2, 3, 4])
    assert reused == 52


@contextmanager
def file_size_limit(size):
    """The system refuses to write more than `size` bytes into a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_gives_one_warning_and_later_prefixes_are_written_again(tmp_path):
    here = store(Target(False), folder=tmp_path)
    with warnings.catch_warnings(record=True) as caught, file_size_limit(64):
        warnings.simplefilter("always")
        for seed in range(3):
            request(here, text(30, seed))
        here.flush()
    [message] = [str(warning.message) for warning in caught]
    assert "prefixes are not kept on disk" in message and "\n" not in message
    assert files(tmp_path) == []
    assert request(here, [*text(30), 1, 2]) == 30  # from memory; now the disk has room again
    request(here, text(30, 9))
    here.flush()
    assert request(store(Target(False), folder=tmp_path), [*text(30, 9), 1, 2]) == 30


def test_a_store_warns_at_once_if_its_disk_has_too_little_free_space_and_writes_nothing(tmp_path):
    with pytest.warns(UserWarning, match="have to stay free; choose another place") as caught:
        here = store(Target(), folder=tmp_path, disk_left=2**60)
        assert len(caught) == 1
        request(here, text(30))
        here.flush()
    assert len(caught) == 1
    assert files(tmp_path) == []


def test_a_folder_of_limited_size_keeps_the_prefixes_used_last(tmp_path):
    """There is room for two. A new store knows from the files' times which were used last."""
    first, second, third = (text(8 * CHUNK + 3, seed) for seed in range(3))
    filled_store(tmp_path / "one", first)
    size = bytes_in(tmp_path / "one")
    settings = {"folder": tmp_path / "two", "disk": 2 * size}
    for ids, reused in ((first, 0), (second, 0), (first, 32), (third, 0), (first, 32), (third, 32)):
        here = store(Target(), **settings)
        assert request(here, ids) == reused
        here.flush()
        assert bytes_in(tmp_path / "two") <= 2 * size
    assert request(store(Target(), **settings), second) == 0


def test_only_the_user_can_read_the_folder_and_foreign_files_are_not_touched(tmp_path):
    """An old temporary file of a store that was killed is removed; a new one may be in use."""
    (tmp_path / "notes").write_text("mine")
    os.chmod(tmp_path, 0o755)
    filled_store(tmp_path, text(30))
    (tmp_path / "prefix" / "notes.safetensors").write_text("mine")
    old_temporary = tmp_path / "prefix" / f".{'a' * 64}.1"
    new_temporary = old_temporary.with_name(f".{'b' * 64}.1")
    old_temporary.write_text("")
    new_temporary.write_text("")
    os.utime(old_temporary, (0, 0))
    filled_store(tmp_path, text(40))
    assert (tmp_path / "prefix").stat().st_mode & 0o777 == 0o700
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    names = {file.name: file for file in files(tmp_path)}
    assert {"notes.safetensors", new_temporary.name} <= set(names)
    assert old_temporary.name not in names
    entries = [file for name, file in names.items() if name.startswith(("block", "checkpoint"))]
    assert {file.stat().st_mode & 0o777 for file in entries} == {0o600}


def test_an_unusable_folder_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another path"):
        store(Target(), Drafter(), folder=tmp_path / "file")
