"""The table of networks: what a config's kind is built as.

`packagings` says which published name means which kind, and `config` reads it. The session that
drafts with a network is what its `start` returns: a `BlockSession`, or a `StepwiseSession` for
networks that draft token by token.
"""

from __future__ import annotations

from .config import DraftConfig
from .dflash2 import DFlash2
from .dspark import DSpark
from .eagle3 import Eagle3
from .lilicorr import ConvolvedLiLiCorr, LiLiCorr
from .network import DFlash
from .packagings import DFLASH, DFLASH2, DSPARK, EAGLE3, LILICORR

NETWORKS: dict[str, type[DFlash]] = {
    DFLASH: DFlash,
    DFLASH2: DFlash2,
    DSPARK: DSpark,
    EAGLE3: Eagle3,
    LILICORR: LiLiCorr,
}


def network_for(config: DraftConfig) -> type[DFlash]:
    """The class of the network that a config calls for."""
    if config.kind == LILICORR and config.conv_kernel_size:
        return ConvolvedLiLiCorr
    return NETWORKS[config.kind]
