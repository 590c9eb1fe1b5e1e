"""What a round's commit adds to its verify forward on a hybrid target, by context length.

    python scripts/commit_cost.py            # the tiny Qwen3.5 hybrid of the tests
    python scripts/commit_cost.py --fast     # with a fast BLAS under MLX, where one is found

Times are the best of several rounds, each evaluated alone: in the loop a commit is part of the
next round's graph. `worst` keeps all rows but one (to keep all of them costs nothing), `mean` is
over every number of kept rows.
"""

import argparse
import sys
import time
from pathlib import Path

import dflash_mlx as dm

ROWS = 16
ROUNDS = 12


def seconds(mx, session, kept: int) -> tuple[float, float]:
    """The verify forward and the commit of one round."""
    start = time.perf_counter()
    logits, _ = session.verify(dm.Proposal(list(range(ROWS))))
    mx.eval(logits, [cache.state for cache in session._cache])
    middle = time.perf_counter()
    session.commit(range(kept))
    mx.eval([cache.state for cache in session._cache])
    return middle - start, time.perf_counter() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="use a fast BLAS")
    if parser.parse_args().fast:
        print(dm.use_fast_blas())
    import mlx.core as mx

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from families import random_model, random_prompt, target_of

    target = target_of(random_model("qwen3_5", max_position_embeddings=32768), "qwen3_5")
    print("context  verify ms  commit ms: worst  mean  | added: worst  mean")
    for context in (1024, 2048, 4096, 8192, 16384):
        session = target.start()
        for _ in session.prefill(random_prompt(context, 0)):
            pass
        verifies, commits = [], []
        for kept in range(1, ROWS + 1):
            rounds = [seconds(mx, session, kept) for _ in range(ROUNDS)]
            verifies.append(min(verify for verify, _ in rounds))
            commits.append(min(commit for _, commit in rounds))
        verify, worst = min(verifies) * 1e3, commits[ROWS - 2] * 1e3
        mean = sum(commits) / ROWS * 1e3
        print(
            f"{context:7}  {verify:9.2f}  {worst:16.2f}  {mean:4.2f}  "
            f"| {worst / verify:12.0%}  {mean / verify:4.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
