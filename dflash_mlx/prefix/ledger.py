"""One account of bytes for what lives and what is stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ledger:
    """How many bytes there are and what they are used for.

    Attributes:
        total: the most that may be used.
        live: of requests, which say so themselves.
        stored: of entries that a later request may begin with.
    """

    total: int
    live: int = 0
    stored: int = 0

    @property
    def over(self) -> int:
        """Bytes used that are not there; 0 or less is well."""
        return self.live + self.stored - self.total
