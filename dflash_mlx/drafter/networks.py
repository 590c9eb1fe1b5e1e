"""The table of networks: what a config's kind is built as.

`packagings` says which published name means which kind, and `config_heads` reads its fields. The
session that drafts with a network is its `session_class`.
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
