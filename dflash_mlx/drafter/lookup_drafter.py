"""Drafters that look up the text itself (`prompt_lookup`), with or without a network."""

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
    """A network's drafter combined with lookups: the draft that promises more tokens is verified.

    A lookup is free and tells at once whether the text has read like this before, so it is asked
    first. A policy compares both by the costs of their steps.

    Args:
        network: the drafter for new text.
    """

    def __init__(self, network: Drafter) -> None:
        self.network = network
        self.tap_layers = network.tap_layers
        self.block_size = block_size(network)
        self.drafts_trees = drafts_trees(network)
        self.label = f"{label(network)}+lookup"

    def __repr__(self) -> str:
        """Show the network."""
        return f"CombinedDrafter({self.network!r})"

    def slot_cost(self, target: Target) -> float | None:
        """The network's cost of a drafted token, in plain steps of the target."""
        return slot_cost(self.network, target)

    def start(self, target: Target, sampler: Sampler) -> DraftSession:
        """Begin one request. Raises `IncompatibleDrafterError`."""
        session = start_session(self.network, target, sampler)
        session.lookup = PromptLookup()
        return session
