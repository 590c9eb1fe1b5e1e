"""The names people and checks call, and that they stay what they are."""

import inspect
import subprocess
import sys

import pytest

import dflash_mlx as dm

NAMES = ["load", "load_target", "load_drafter", "generate", "stream_generate", "use_fast_blas"]
CLASSES = ["DFlash", "DFlashError", "DraftConfig", "Event", "Proposal", "Result", "Stats", "Target"]


def run(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_names_are_there():
    assert set(NAMES + CLASSES) <= set(dm.__all__) == set(dir(dm))
    assert all(inspect.isfunction(getattr(dm, name)) for name in NAMES)
    assert all(inspect.isclass(getattr(dm, name)) for name in CLASSES)


@pytest.mark.parametrize("imported_before", ["nothing", "every submodule"])
def test_names_do_not_depend_on_what_was_imported_before(imported_before):
    """A submodule that is imported becomes an attribute, which must not hide a function."""
    code = "import importlib, inspect, pkgutil, dflash_mlx as dm;"
    if imported_before == "every submodule":
        code += "[importlib.import_module('dflash_mlx.' + m.name)"
        code += " for m in pkgutil.iter_modules(dm.__path__)];"
    code += "[getattr(dm, n) for n in dm.__all__];"  # the first look may import, too
    code += f"print([n for n in {NAMES} if not inspect.isfunction(getattr(dm, n))])"
    assert run(code) == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        dm.magic  # noqa: B018


def test_settings_have_the_names_of_the_design():
    settings = list(inspect.signature(dm.stream_generate).parameters)
    assert settings[:3] == ["target", "drafter", "prompt"]
    wanted = "max_tokens temperature top_p top_k min_p seed block_size tree_budget stop"
    assert set(wanted.split()) <= set(settings)
    positional = [
        parameter.name
        for parameter in inspect.signature(dm.load).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == ["name", "draft", "target_bits", "draft_bits"]


def test_every_error_is_one_of_ours():
    from dflash_mlx import errors

    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind)]
    assert all(issubclass(kind, dm.DFlashError) for kind in kinds)
    assert all(kind.__doc__ and kind.__name__ in errors.__doc__ for kind in kinds)
