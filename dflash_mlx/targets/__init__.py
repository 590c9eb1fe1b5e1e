"""The target: an mlx-lm model that verifies drafts and whose text is never changed."""

from .target import Target, TargetSession

__all__ = ["Target", "TargetSession"]
