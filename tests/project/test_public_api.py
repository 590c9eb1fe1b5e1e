"""The public names: all of them exist and stay what they are."""

import dataclasses
import inspect
import json
import pydoc
import subprocess
import sys

import pytest
import tinymodels

import dflash_mlx as dm

NAMES = ["load", "load_target", "load_drafter", "generate", "stream_generate", "use_fast_blas"]
CLASSES = ["DFlash", "DFlashError", "DraftConfig", "Event", "Proposal", "Result", "Stats", "Target"]


def run(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_public_names_exist():
    assert set(NAMES + CLASSES) <= set(dm.__all__) == set(dir(dm))
    assert all(inspect.isfunction(getattr(dm, name)) for name in NAMES)
    assert all(inspect.isclass(getattr(dm, name)) for name in CLASSES)
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        dm.magic  # noqa: B018


def test_names_do_not_depend_on_what_was_imported_before():
    """A submodule that is imported becomes an attribute, which must not hide a function."""
    code = "import importlib, inspect, pkgutil, dflash_mlx as dm;"
    code += "[importlib.import_module('dflash_mlx.' + m.name)"
    code += " for m in pkgutil.iter_modules(dm.__path__)];"
    code += "[getattr(dm, n) for n in dm.__all__];"  # the first access may also import
    code += f"print([n for n in {NAMES} if not inspect.isfunction(getattr(dm, n))])"
    assert run(code) == "[]"


def test_settings_and_parameters_keep_their_names():
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
    for function in (dm.generate, dm.stream_generate):
        shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
        shown = shown.replace("'", "")  # Python before 3.14 quotes each type
        assert "max_tokens: int = 256" in shown and "repetition_penalty: float = 1.0" in shown


def test_a_repr_is_a_line():
    """A notebook shows the value of a cell's last line, which must not be a page of layers."""
    target = tinymodels.target()
    drafter = tinymodels.random_drafter()
    result = dm.generate(target, drafter, "x" * 500, max_tokens=90)
    for shown in map(repr, (target, drafter, result, result.stats)):
        assert "\n" not in shown and len(shown) < 250, shown
    assert repr(target).startswith("Target(") and "rounds=" in repr(result)
    assert repr(drafter).startswith("DFlash(")


def test_a_result_can_be_converted_to_json():
    result = dm.generate(tinymodels.target(), tinymodels.random_drafter(), "x", max_tokens=20)
    written = dataclasses.asdict(result)
    assert written["stats"]["widths"] == result.stats.widths
    assert sum(result.stats.widths.values()) == result.stats.rounds
    assert json.loads(json.dumps(written))["tokens"] == result.tokens


def test_every_error_is_one_of_ours():
    from dflash_mlx import errors

    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind)]
    assert all(issubclass(kind, dm.DFlashError) for kind in kinds)
    assert all(kind.__doc__ and kind.__name__ in errors.__doc__ for kind in kinds)
