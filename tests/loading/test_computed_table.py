"""computed.toml agrees with the installed mlx-lm: with its code, and with its models' logits."""

import copy
import importlib
import inspect
import json
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx.utils import tree_map

from dflash_mlx.loading.config_gaps import _table, apply_ignored_fields, build_model
from dflash_mlx.loading.rope_config import normalize_rope_fields
from dflash_mlx.targets.internals import classes_of
from dflash_mlx.validation import text_config

MODELS = json.loads((Path(__file__).parents[1] / "data" / "mlx_lm_models.json").read_text())
TABLE = _table()
FIELDS = TABLE["switches"] | TABLE["factors"] | TABLE["other"]
NEEDS_A_PACKAGE = {"olmo"}  # cannot be imported without it
# By field or activation: modules where the search below finds it, though it is not computed there,
# or does not find it, though it is computed.
EXCEPTIONS = {
    "clip_qkv": {"dbrx"},  # in its attn_config
    "n_group": {"plamo2"},  # query heads to a key head
    "final_logit_softcapping": {"nanochat"},  # 15, whatever the config says
    "gelu": {"muse_spark", "phixtral"},  # in the vision part; as the default of switch_layers
}
# What the code of a module with this activation has.
FUNCTIONS = {"gelu": r"\bnn\.gelu|GELU\(", "relu": r"\bnn\.relu|ReLU", "xielu": "XieLU"}
FUNCTIONS |= {"situ": r"class SiTU", "gegelu": r"def gegelu"}


@cache
def code_of_modules() -> dict[str, str]:
    """The code of mlx-lm's models, without the declarations of their configs."""
    codes = {}
    for item in pkgutil.iter_modules(mlx_lm.models.__path__):
        if item.name in NEEDS_A_PACKAGE:
            continue
        module = importlib.import_module(f"mlx_lm.models.{item.name}")
        code = inspect.getsource(module)
        for value in vars(module).values():
            if hasattr(value, "from_dict") and value.__module__ == module.__name__:
                code = code.replace(inspect.getsource(value), "")
        codes[item.name] = code
    return codes


@pytest.mark.parametrize("field", FIELDS)
def test_the_modules_that_read_a_field_are_those_of_the_table(field: str) -> None:
    """If it fails, mlx-lm has closed a gap or opened one: look at the module, then mend the row."""
    pattern = re.compile(rf"\b{field}\b")
    modules = {name for name, code in code_of_modules().items() if pattern.search(code)}
    difference = modules ^ FIELDS[field]
    assert difference == EXCEPTIONS.get(field, set())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_modules_with_another_activation_are_those_of_the_table(function: str) -> None:
    pattern = re.compile(FUNCTIONS[function])
    modules = {name for name, code in code_of_modules().items() if pattern.search(code)}
    modules -= {"activations", "switch_layers"}  # define activations for the others
    difference = modules ^ TABLE["activations"][function]
    assert difference == EXCEPTIONS.get(function, set())


@pytest.mark.parametrize("score", TABLE["scores"])
def test_the_modules_of_a_score_are_those_of_the_table(score: str) -> None:
    """Only modules with experts count: attention also has a softmax, and gates have a sigmoid."""
    pattern = {"sqrtsoftplus": r"mx\.sqrt\(nn\.softplus"}.get(score, rf"mx\.{score}\(")
    experts = {name: code for name, code in code_of_modules().items() if "SwitchGLU(" in code}
    modules = {name for name, code in experts.items() if re.search(pattern, code)}
    listed = TABLE["scores"][score]
    assert modules <= listed | NOT_OF_ROUTERS[score]
    assert listed - modules <= NOT_FOUND


# Modules with experts that use the function elsewhere.
NOT_OF_ROUTERS = {
    "sigmoid": {"afmoe", "qwen2_moe", "qwen3_next", "muse_spark"},
    "softmax": {"Klear", "kimi_k3"},
    "sqrtsoftplus": set(),
}
# Modules whose experts are not a SwitchGLU, and two that write the function in another way.
NOT_FOUND = {"phixtral", "nemotron_h", "dbrx", "ernie4_5_moe", "muse_spark"}


# Modules whose tiny config here asks for what they do not compute.
CONTRADICTORY = {"nemotron", "qwen3_5", "qwen3_5_moe", "recurrent_gemma"}


def logits(config: dict[str, Any]) -> mx.array:
    """Logits [1, 8, V] of a seeded model, with weights so large that each of its parts matters."""
    model_class, arguments = classes_of(config)
    mx.random.seed(0)
    model = model_class(arguments.from_dict(config))
    model.update(tree_map(lambda w: 3 * w if w.ndim > 1 else w, model.parameters()))
    return model(mx.array([[1, 2, 3, 4, 5, 6, 7, 8]]))


# What a field is set to; the other fields to 2.0.
VALUES: dict[str, Any] = {
    "no_rope_layers": [1, 0, 1, 0],
    "attn_logit_softcapping": 0.01,
    "final_logit_softcapping": 0.5,
    "logits_soft_cap": 0.5,
    "attention_multiplier": 0.9,
}
OF_EXPERTS = {"routed_scaling_factor", "n_group"}  # need groups of experts
PAIRS = [
    (field, name)
    for field in (*TABLE["switches"], *TABLE["factors"])
    for name in sorted(FIELDS[field] & MODELS.keys())
    if field not in OF_EXPERTS and (field, name) not in {("final_logit_softcapping", "nanochat")}
]


@pytest.mark.parametrize(("field", "name"), PAIRS)
def test_a_field_of_the_table_changes_the_logits(field: str, name: str) -> None:
    """One config has the field and the other does not; a switch is on in one, off in the other."""
    configs = []
    for value in (None, VALUES.get(field, 2.0)):
        config = copy.deepcopy(MODELS[name])
        if field == "use_parallel_residual":
            text_config(config)[field] = value is None
        elif value is not None:
            text_config(config)[field] = value
        configs.append(config)
    plain, changed = map(logits, configs)
    assert not mx.array_equal(plain, changed)


@pytest.mark.filterwarnings("ignore:dflash-mlx")
@pytest.mark.parametrize("name", sorted(MODELS.keys() - CONTRADICTORY))
def test_what_mlx_lm_runs_is_not_refused(name: str) -> None:
    assert build_model(name, MODELS[name])


def test_a_module_that_the_table_does_not_know_is_refused_where_it_may_leave_something_out() -> (
    None
):
    config = normalize_rope_fields(MODELS["llama"])
    model_class, arguments = classes_of(config)
    model = model_class(arguments.from_dict(config))
    apply_ignored_fields("a", model, config | {"hidden_act": "silu", "alibi": False})
    for field, value in {"hidden_act": "mish", "alibi": True, "logit_scale": 0.5}.items():
        with pytest.raises(Exception, match=f"does not compute {field}"):
            apply_ignored_fields("a", model, config | {field: value})
