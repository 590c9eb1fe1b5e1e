"""Write answers with the target: hundreds of sequences at once, each step one CUDA graph.

Slots hold the sequences. The host looks at them every `STEPS` steps only; a sequence that ended
meanwhile was written on in vain until then, and the next prompt takes its slot.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .target import Caches, SmolLM2

STEPS = 16  # between two looks at the sequences
REFILL = 8  # an eighth of the slots is free before prompts are read
# Lengths are rounded up to a multiple of it: those of prompts and of what a step reads of caches.
ROUND = 64
REPEATED = 32  # an answer that repeats its last 32 tokens is ended
TOP = 20  # a min-p of 0.05 leaves at most so many tokens


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; a temperature of 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Sampling()


@dataclass
class Task:
    """A prompt, and its answer once it is written.

    Attributes:
        number: whatever the caller tells tasks apart by.
        prompt: token ids.
        limit: tokens of the answer.
        sampling: how they are drawn.
        answer: token ids, with the end token.
        ended: whether the answer came to an end token.
    """

    number: int
    prompt: Sequence[int]
    limit: int
    sampling: Sampling = GREEDY
    answer: list[int] = field(default_factory=list)
    ended: bool = False


class Writer:
    """Writes answers.

    Args:
        target: the model.
        slots: sequences written at once.
        length: tokens of a sequence at most, prompt and answer.
        seed: of what is drawn.
        graphs: whether a step is a CUDA graph; on a CPU it cannot be.
    """

    def __init__(
        self, target: SmolLM2, slots: int, length: int, seed: int = 0, graphs: bool = False
    ) -> None:
        device = target.device
        self._uses_graphs = graphs
        self._target = target
        self._length = length
        self._random = torch.Generator(device).manual_seed(seed)
        self._tasks: list[Task | None] = [None] * slots
        self._caches: Caches = target.new_caches(slots, length)
        self._text = torch.zeros((slots, length), dtype=torch.long, device=device)
        self._newest = torch.zeros(slots, dtype=torch.long, device=device)
        self._positions = torch.zeros(slots, dtype=torch.long, device=device)
        self._starts = torch.zeros(slots, dtype=torch.long, device=device)
        self._limits = torch.ones(slots, dtype=torch.long, device=device)
        self._sampling = torch.zeros((slots, 3), device=device)
        self._noise = torch.ones((slots, TOP), device=device)
        self._stops = torch.tensor(target.stops, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def write(
        self,
        tasks: Iterable[Task],
        done: Callable[[Task], Task | None],
        deadline: float = float("inf"),
    ) -> int:
        """Write the answers of all tasks; returns how many tokens they have.

        Args:
            tasks: prompts of at most `length` tokens with their answers; others are left out.
            done: takes a finished task, and may return one that goes on with it.
            deadline: what is not finished at this time.monotonic() is dropped.
        """
        waiting = deque(task for task in tasks if self._fits(task))
        count = 0
        while time.monotonic() < deadline:
            free = [slot for slot, task in enumerate(self._tasks) if task is None]
            if len(free) == len(self._tasks) and not waiting:
                break
            if waiting and len(free) >= max(1, len(self._tasks) // REFILL):
                number = min(len(free), len(waiting))
                self._read(free[:number], [waiting.popleft() for _ in range(number)])
            self._steps()
            for task in self._finished():
                count += len(task.answer)
                more = done(task)
                if more is not None and self._fits(more):
                    waiting.append(more)
        self._tasks = [None] * len(self._tasks)
        return count

    def _fits(self, task: Task) -> bool:
        return len(task.prompt) + task.limit + STEPS < self._length

    def _read(self, slots: list[int], tasks: list[Task]) -> None:
        """Read prompts into slots, and choose the first tokens of their answers."""
        device = self._target.device
        lengths = torch.tensor([len(task.prompt) for task in tasks])
        width = rounded(int(lengths.max()))
        padded = torch.zeros((len(tasks), width), dtype=torch.long)
        for row, task in enumerate(tasks):
            padded[row, : len(task.prompt)] = torch.tensor(task.prompt)
            self._tasks[slots[row]] = task
        tokens = padded.to(device)
        starts = lengths.to(device)
        places = torch.tensor(slots, device=device)
        caches: Caches = []
        hidden, _ = self._target.read(tokens, caches=caches)
        for kept, new in zip(self._caches, caches, strict=True):
            for whole, part in zip(kept, new, strict=True):
                whole[places, :, :width] = part
        settings = [(t.sampling.temperature, t.sampling.top_p, t.sampling.min_p) for t in tasks]
        self._sampling[places] = torch.tensor(settings, device=device)
        self._limits[places] = torch.tensor([task.limit for task in tasks], device=device)
        self._starts[places] = starts
        self._positions[places] = starts
        self._draw_noise()
        logits = self._target.head(hidden[torch.arange(len(tasks), device=device), starts - 1])
        first = chosen(logits, self._sampling[places], self._noise[places])
        self._text[places, :width] = tokens
        self._text[places, starts] = first
        self._newest[places] = first

    def _steps(self) -> None:
        """Write `STEPS` tokens of every slot."""
        busy = torch.tensor([task is not None for task in self._tasks])
        longest = int(self._positions.cpu()[busy].max())
        span = min(self._length, rounded(longest + STEPS + 1))
        for _ in range(STEPS):
            self._draw_noise()
            if self._uses_graphs:
                self._graph(span).replay()
            else:
                self._step(span)

    def _step(self, span: int) -> None:
        """Write a token of every slot, reading `span` places of the caches."""
        # A slot without a task stays where it is.
        positions = self._positions.clamp(max=span - 1)
        logits = self._target.step(self._newest, positions, self._caches, span)
        self._newest.copy_(chosen(logits, self._sampling, self._noise))
        self._positions.copy_((positions + 1).clamp(max=self._length - 1))
        self._text.scatter_(1, self._positions[:, None], self._newest[:, None])

    def _graph(self, span: int) -> torch.cuda.CUDAGraph:
        """The graph of a step that reads `span` places. Capturing it does not change the state."""
        if span not in self._graphs:
            state = [self._newest, self._positions, self._text]
            before = [tensor.clone() for tensor in state]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # a first run may allocate, and choose its kernels
                self._step(span)
            torch.cuda.current_stream().wait_stream(stream)
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(span)
            self._graphs[span] = graph
        return self._graphs[span]

    def _draw_noise(self) -> None:
        self._noise.exponential_(generator=self._random)

    def _finished(self) -> list[Task]:
        """The tasks whose answers are over, which leave their slots."""
        counts = answer_lengths(
            self._text, self._starts, self._positions + 1, self._limits, self._stops
        ).tolist()
        finished = []
        for slot, task in enumerate(self._tasks):
            if task is not None and counts[slot]:
                start = len(task.prompt)
                task.answer = self._text[slot, start : start + counts[slot]].tolist()
                task.ended = task.answer[-1] in self._target.stops
                self._tasks[slot] = None
                finished.append(task)
        return finished


def rounded(length: int) -> int:
    """A length rounded up to a multiple of `ROUND`."""
    return -(-length // ROUND) * ROUND


def chosen(logits: Tensor, sampling: Tensor, noise: Tensor) -> Tensor:
    """The next tokens [N].

    Args:
        logits: [N, V].
        sampling: temperature, top-p and min-p of each row [N, 3].
        noise: drawn from the exponential distribution, [N, TOP]; the token whose probability over
            its noise is largest is a draw from the probabilities.
    """
    tops = logits.topk(TOP, dim=-1)
    temperature, top_p, min_p = sampling[:, :, None].unbind(dim=1)
    likely = tops.values.softmax(dim=-1) >= min_p * tops.values.softmax(dim=-1)[:, :1]
    shares = (tops.values / temperature.clamp(min=1e-3)).softmax(dim=-1)
    likely &= shares.cumsum(dim=-1) - shares < top_p
    drawn = (shares * likely / noise).argmax(dim=-1, keepdim=True)
    return tops.indices.gather(1, drawn * (temperature > 0))[:, 0]


def answer_lengths(
    text: Tensor, starts: Tensor, ends: Tensor, limits: Tensor, stops: Tensor
) -> Tensor:
    """The length of each answer that is over, 0 for the others, [N].

    An answer is over at its first end token, at its limit, or when its last `REPEATED` tokens are
    the same as those that end 1 to `REPEATED` tokens earlier.

    Args:
        text: prompts and answers [N, L].
        starts, ends: of the answers so far, [N].
        limits: tokens of an answer [N].
        stops: the end tokens.
    """
    counts = torch.arange(text.shape[1], device=text.device) - starts[:, None] + 1
    over = torch.isin(text, stops) | (counts >= limits[:, None])
    repeats = torch.zeros_like(over)
    for shift in range(1, REPEATED + 1):
        same = torch.zeros_like(text)
        same[:, shift:] = text[:, shift:] == text[:, :-shift]
        total = same.cumsum(dim=1)
        repeats[:, REPEATED:] |= total[:, REPEATED:] - total[:, :-REPEATED] == REPEATED
    over |= repeats & (counts > 2 * REPEATED)
    over &= (counts > 0) & (counts <= (ends - starts)[:, None])
    first = counts.gather(1, over.int().argmax(dim=1, keepdim=True))[:, 0]
    return torch.where(over.any(dim=1), first, 0)
