"""DFlash speculative decoding for MLX: the same text as the model alone, in fewer passes.

    import dflash_mlx as dm

    target, drafter = dm.load("tiny")
    messages = [{"role": "user", "content": "What is 37 plus 48?"}]
    print(dm.generate(target, drafter, messages, policy="auto").text)

Messages go through the target's chat template. Text is used unchanged: for models without a
template, and to continue a text.

With policy="auto" each step drafts as many tokens as pay off; without it, a full block. To keep
what a policy learns from request to request, make one with `dm.DraftPolicy.of(target, drafter)`.

Public names are imported on first use, so `import dflash_mlx` does not import MLX. The errors and
`use_fast_blas` work without MLX, and a BLAS can be loaded before it.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing it from typing takes a third of the start-up time
if TYPE_CHECKING:
    from typing import Any

    from .conversation import Conversation as Conversation
    from .drafter.config import DraftConfig as DraftConfig
    from .drafter.dflash import DFlash as DFlash
    from .engine.engine import Engine as Engine
    from .engine.job import Job as Job
    from .errors import DFlashError as DFlashError
    from .errors import MissingDependencyError as MissingDependencyError
    from .events import Event as Event
    from .events import Result as Result
    from .events import Stats as Stats
    from .generation import GenerationSettings as GenerationSettings
    from .loading.load import load as load
    from .loading.load import load_drafter as load_drafter
    from .loading.load import load_target as load_target
    from .loop import generate as generate
    from .loop import stream_generate as stream_generate
    from .machine.blas import use_fast_blas as use_fast_blas
    from .policy.draft_policy import DraftPolicy as DraftPolicy
    from .prefix.store import PrefixStore as PrefixStore
    from .proposal import Proposal as Proposal
    from .targets import Target as Target

__version__ = "0.1.0"

# The public names of each module.
_MODULES = {
    ".conversation": "Conversation",
    ".drafter.config": "DraftConfig",
    ".drafter.dflash": "DFlash",
    ".engine.engine": "Engine",
    ".engine.job": "Job",
    ".errors": "DFlashError MissingDependencyError",
    ".events": "Event Result Stats",
    ".generation": "GenerationSettings",
    ".loading.load": "load load_drafter load_target",
    ".loop": "generate stream_generate",
    ".machine.blas": "use_fast_blas",
    ".policy.draft_policy": "DraftPolicy",
    ".prefix.store": "PrefixStore",
    ".proposal": "Proposal",
    ".targets": "Target",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    except ModuleNotFoundError as error:
        if error.name not in ("mlx", "mlx.core", "mlx_lm"):
            raise
        from .errors import MissingDependencyError

        package = error.name.partition(".")[0].replace("_", "-")
        raise MissingDependencyError.of(f"{package} is not installed", "mlx") from error
    except ValueError as error:
        from .errors import error_of_import

        raise error_of_import(error) or error from error


def __dir__() -> list[str]:
    return __all__
