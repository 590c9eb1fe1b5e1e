"""Drafting from the text itself (`prompt_lookup`), alone or beside a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .prompt_lookup import BLOCK_SIZE, PromptLookup
from .protocol import (
    Drafter,
    DraftSession,
    PlainSession,
    block_size,
    drafts_trees,
    label,
    slot_cost,
    start_session,
)

if TYPE_CHECKING:
    from ..sampling import Sampler
    from ..targets import Target


class LookupDrafter:
    """Drafts for any target, without a network."""

    tap_layers = ()
    label = "lookup"
    block_size = BLOCK_SIZE

    def start(self, target: Target, sampler: Sampler) -> DraftSession:
        """Begin one request."""
        session = PlainSession()
        session.lookup = PromptLookup()
        return session


class CombinedDrafter:
    """A network's drafter and lookups: the draft that promises more tokens is verified.

    The lookup is free and says at once whether the text has read like this before, so it is asked
    first. A policy compares both by what their steps cost.

    Args:
        network: drafts where the text is new.
    """

    def __init__(self, network: Drafter) -> None:
        self.network = network
        self.tap_layers = network.tap_layers
        self.block_size = block_size(network)
        self.drafts_trees = drafts_trees(network)
        self.label = f"{label(network)}+lookup"

    def __repr__(self) -> str:
        """One line."""
        return f"CombinedDrafter({self.network!r})"

    def slot_cost(self, target: Target) -> float | None:
        """The network's."""
        return slot_cost(self.network, target)

    def start(self, target: Target, sampler: Sampler) -> DraftSession:
        """Begin one request. Raises `IncompatibleDrafterError`."""
        session = start_session(self.network, target, sampler)
        session.lookup = PromptLookup()
        return session
