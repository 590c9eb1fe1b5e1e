"""DFlash speculative decoding for MLX: several times faster text, token for token the same.

    import dflash_mlx as dm

    target, drafter = dm.load("tiny")
    messages = [{"role": "user", "content": "What is 37 plus 48?"}]
    print(dm.generate(target, drafter, messages).text)

Messages go through the target's chat template. Text is used as it is, for models without a template
and for text to continue.

Each step drafts a whole block unless a policy, `dm.DraftPolicy.of(target, drafter)`, decides.

The public names are imported on first use, so `import dflash_mlx` does not import MLX: the errors
and `use_fast_blas` work without it, and a BLAS can be loaded before it.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own takes a third of the start-up time
if TYPE_CHECKING:
    from typing import Any

    from .conversation import Conversation
    from .drafter.config import DraftConfig
    from .drafter.network import DFlash
    from .engine.engine import Engine
    from .engine.job import Job
    from .errors import DFlashError
    from .events import Event, Result, Stats
    from .generation import GenerationSettings
    from .loading.load import load, load_drafter, load_target
    from .loop import generate, stream_generate
    from .machine.blas import use_fast_blas
    from .policy.draft_policy import DraftPolicy, Policy
    from .prefix.cache import PrefixStore
    from .proposal import Proposal
    from .targets import Target

__version__ = "0.1.0"

__all__ = [
    "Conversation",
    "DFlash",
    "DFlashError",
    "DraftConfig",
    "Engine",
    "Event",
    "GenerationSettings",
    "Job",
    "DraftPolicy",
    "Policy",
    "PrefixStore",
    "Proposal",
    "Result",
    "Stats",
    "Target",
    "generate",
    "load",
    "load_drafter",
    "load_target",
    "stream_generate",
    "use_fast_blas",
]

_HOME = {
    "Conversation": ".conversation",
    "DFlash": ".drafter.network",
    "DFlashError": ".errors",
    "DraftConfig": ".drafter.config",
    "Engine": ".engine.engine",
    "Event": ".events",
    "GenerationSettings": ".generation",
    "Job": ".engine.job",
    "MissingDependencyError": ".errors",
    "DraftPolicy": ".policy.draft_policy",
    "Policy": ".policy.draft_policy",
    "PrefixStore": ".prefix.cache",
    "Proposal": ".proposal",
    "Result": ".events",
    "Stats": ".events",
    "Target": ".targets",
    "generate": ".loop",
    "load": ".loading.load",
    "load_drafter": ".loading.load",
    "load_target": ".loading.load",
    "stream_generate": ".loop",
    "use_fast_blas": ".machine.blas",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME[name], __name__), name)
    except ModuleNotFoundError as error:
        if error.name not in ("mlx", "mlx.core", "mlx_lm"):
            raise
        from .errors import MissingDependencyError

        package = error.name.partition(".")[0].replace("_", "-")
        raise MissingDependencyError.of(f"{package} is not installed", "mlx") from error


def __dir__() -> list[str]:
    return sorted(__all__)
