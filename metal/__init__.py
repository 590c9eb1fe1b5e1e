"""The Metal sources, one file per kernel. A package only so that a wheel can carry them."""
