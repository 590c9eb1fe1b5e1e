"""Peak memory of a drafter while a long prompt streams in, against what its features would take.

    python scripts/prefill_memory.py --context 32768 --hidden 1024 --window 2048

The weights are random: only shapes matter here. Features come in chunks of the target's prefill, so
the peak must not grow with the context but for the keys and values of full-attention layers.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import dflash_mlx

dflash_mlx.use_fast_blas()

import mlx.core as mx  # noqa: E402  after the BLAS

from dflash_mlx.drafter.config import DraftConfig  # noqa: E402
from dflash_mlx.drafter.network import DFlash  # noqa: E402
from dflash_mlx.targets.target import PREFILL_STEP  # noqa: E402


def peak_bytes(drafter: DFlash, tokens: int) -> int:
    """The most memory that prefilling `tokens` tokens and drafting a block adds to the weights'."""
    config = drafter.config
    features = len(config.target_layer_ids) * config.hidden_size
    target = SimpleNamespace(
        embed=lambda ids: mx.zeros((*ids.shape, config.hidden_size)),
        head=lambda hidden: mx.zeros((*hidden.shape[:2], config.vocab_size)),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_target_layers,
    )
    session, before = drafter.start(target), mx.get_active_memory()
    mx.reset_peak_memory()
    for start in range(0, tokens, PREFILL_STEP):
        taps = mx.random.normal((1, min(PREFILL_STEP, tokens - start), features))
        mx.eval(taps)  # as the target's prefill hands them over
        session.extend(taps)
    mx.eval(session.propose(1, config.block_size).tokens)
    return int(mx.get_peak_memory() - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--window", type=int, default=2048, help="of every layer but the last")
    options = parser.parse_args()
    kinds = ["sliding_attention"] * (options.layers - 1) + ["full_attention"]
    config = DraftConfig.from_dict(
        {
            "hidden_size": options.hidden,
            "num_hidden_layers": options.layers,
            "intermediate_size": 3 * options.hidden,
            "num_attention_heads": options.hidden // 64,
            "num_key_value_heads": max(options.hidden // 256, 1),
            "head_dim": 64,
            "vocab_size": 1024,
            "block_size": 16,
            "layer_types": kinds,
            "sliding_window": options.window,
            "num_target_layers": 64,
            "mask_token_id": 0,
            "target_layer_ids": list(range(options.taps)),
        }
    )
    drafter = DFlash(config)
    mx.eval(drafter.parameters())
    print(f"{'tokens':>8} {'peak MB':>9} {'all features MB':>16}")
    for tokens in options.context:
        features = 4 * tokens * options.taps * options.hidden
        print(f"{tokens:8} {peak_bytes(drafter, tokens) / 1e6:9.1f} {features / 1e6:16.1f}")


if __name__ == "__main__":
    main()
