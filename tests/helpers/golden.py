"""Golden drafters: weights, and the outputs that their authors' code computes from them."""

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx

from dflash_mlx.drafter.dspark import DSpark
from dflash_mlx.loading.drafter_loader import read_drafter
from dflash_mlx.loading.folder import Folder

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FOLDERS = [
    "dflash_full",
    "dflash_sliding",
    "dflash2",
    "dflash_block7",
    "dspark",
    "dspark_speculators",
    "jetspec",
    "jetspec_adapter",
    "muse_assistant",
]


def corrected(drafter: DSpark, logits: mx.array, hidden: mx.array, previous: mx.array) -> mx.array:
    """Logits [L, DV] with the Markov head's bias for the preceding tokens [L]."""
    biases = []
    state = drafter.markov_head.first_state(1)
    for row in range(len(previous)):
        bias, state = drafter.markov_head.step(hidden[row], previous[row : row + 1], state)
        biases.append(bias[0])
    return logits.astype(mx.float32) + drafter.config.logit_scale * mx.stack(biases)


class Golden:
    """A golden drafter, and the expected values of several drafting steps over one text."""

    def __init__(self, name: str) -> None:
        self.folder = GOLDEN / name
        self.drafter = read_drafter(Folder(self.folder))
        self.cases = mx.load(str(self.folder / "cases.safetensors"))
        self.rounds = sum(name.endswith(".start") for name in self.cases)
        self.context = self.cases["context"][None]

    def case(self, number: int) -> SimpleNamespace:
        """The inputs and expected outputs of step `number`."""
        prefix = f"round{number}."
        arrays = {
            name.removeprefix(prefix): array
            for name, array in self.cases.items()
            if name.startswith(prefix)
        }
        start = arrays.pop("start").item()
        anchor = arrays.pop("anchor").item()
        return SimpleNamespace(start=start, anchor=anchor, **arrays)

    def target(self) -> SimpleNamespace:
        """The parts of a target that a drafter uses."""
        config = self.drafter.config

        def embed(tokens: mx.array) -> mx.array:
            return self.cases["target.embed_tokens"][tokens]

        def head(hidden: mx.array) -> mx.array:
            return hidden @ self.cases["target.lm_head"].T

        return SimpleNamespace(
            embed=embed,
            head=head,
            hidden_size=config.target_hidden_size,
            vocab_size=config.vocab_size,
            num_layers=12,
        )
