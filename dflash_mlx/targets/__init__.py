"""The target: an mlx-lm model that verifies drafts and whose text is never changed."""

from .session import TargetSession
from .target import Target

__all__ = ["Target", "TargetSession"]
