"""A rank that plays one part after the other, so that it starts once.

MLX_RANK=0 MLX_HOSTFILE=ring.json python cluster_rank.py pair turns -- stages
"""

import sys
from itertools import groupby

import cluster_families
import cluster_pair
import cluster_stages

PARTS = {
    "pair": cluster_pair.main,
    "families": cluster_families.main,
    "stages": cluster_stages.main,
}

if __name__ == "__main__":
    for between, part in groupby(sys.argv[1:], "--".__eq__):
        if not between:
            name, *arguments = part
            PARTS[name](arguments)
