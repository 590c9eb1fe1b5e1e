"""`dflash-mlx chat`: a conversation on the terminal, or one line of a pipe after another."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import dflash_mlx
from dflash_mlx.errors import PromptError

from . import options
from .pair import Choice, Pair, explain, open_pair
from .screen import error_line, note, show_text

if TYPE_CHECKING:
    from dflash_mlx import Event

PROMPT = ">>> "
HELP = "/clear forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    model: options.Model = "tiny",
    draft: options.Draft = None,
    no_draft: options.NoDraft = False,
    target_bits: options.TargetBits = None,
    draft_bits: options.DraftBits = None,
    quant_mode: options.Quantize = options.QuantMode.affine,
    group_size: options.GroupSize = None,
    exact: options.Exact = None,
    offline: options.Offline = False,
    stock_blas: options.StockBlas = False,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    block_size: options.BlockSize = None,
    tree_budget: options.TreeBudget = "off",
    kv_bits: options.KvBits = None,
    no_policy: options.NoPolicy = False,
    stop: options.Stop = None,
    verbose: options.Verbose = False,
) -> None:
    """Talk with a model. In a pipe every line is a turn, and stdout holds the answers alone."""
    choice = Choice(
        model=model,
        draft=draft,
        no_draft=no_draft,
        target_bits=target_bits,
        draft_bits=draft_bits,
        quant_mode=quant_mode,
        group_size=group_size,
        exact=exact,
        offline=offline,
        stock_blas=stock_blas,
        block_size=block_size,
        tree_budget=tree_budget,
        kv_bits=kv_bits,
        policy=not no_policy,
    )
    pair = open_pair(choice)
    if not pair.target.tokenizer.has_chat_template:
        raise PromptError(f"{pair.target.name} has no chat template: it cannot chat.")
    settings = options.sampling(temperature, top_p, top_k, min_p, seed)
    settings |= {
        "max_tokens": max_tokens,
        "block_size": pair.block_size,
        "kv_bits": pair.kv_bits,
        "policy": pair.policy,
        "stop": stop or (),
    }
    Conversation(pair, settings, verbose).run()


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, pair: Pair, settings: dict[str, Any], verbose: bool = False) -> None:
        self.pair, self.settings, self.verbose = pair, settings, verbose
        self.messages: list[dict[str, str]] = []
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Take turns until the person leaves. Raises `PromptError` in a pipe only."""
        if self.interactive:
            import readline  # noqa: F401  gives input() its line editing and history

            note(f"{self.pair.title}\n{HELP}")
        while (line := self._read()) is not None:
            command = line.strip()
            if command == "/quit":
                return
            if command == "/clear":
                self.messages.clear()
                note("The conversation is forgotten.")
            elif command == "/help":
                note(HELP)
            elif command.startswith("/") and " " not in command and self.interactive:
                note(f"There is no {command}: {HELP}")
            elif command:
                self.take_turn(line)

    def _read(self) -> str | None:
        """The next line; None when there are no more."""
        if not self.interactive:
            try:
                line = sys.stdin.buffer.readline().decode()
            except UnicodeError as error:
                raise PromptError("The input is not text in UTF-8.") from error
            return line.rstrip("\n") if line else None
        try:
            return input(PROMPT)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            note("Ctrl-D or /quit leaves.")
            return ""
        except UnicodeError:
            error_line("That was not text in UTF-8.")
            return ""

    def take_turn(self, line: str) -> None:
        """Answer, and remember both sides; a stopped answer is kept as far as it came."""
        self.messages.append({"role": "user", "content": line})
        events: list[Event] = []
        stopped = False
        try:
            answer = dflash_mlx.stream_generate(
                self.pair.target, self.pair.drafter, self.messages, **self.settings
            )
            show_text(answer, events)
        except PromptError as error:  # the conversation has outgrown the context
            if not self.interactive:
                raise
            self.messages.pop()
            error_line(f"{error} /clear starts a new conversation.")
            return
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            stopped = True
            print()
        self.messages.append({"role": "assistant", "content": "".join(e.text for e in events)})
        if events:
            note(_status(self.pair, events[-1], stopped))
            if self.verbose:
                explain(self.pair, events[-1].stats)


def _status(pair: Pair, last: Event, stopped: bool) -> str:
    """One line about an answer."""
    stats = last.stats
    parts = [f"{stats.output_tokens} tokens", f"{stats.tokens_per_second:,.0f} tok/s"]
    if stats.drafted_tokens:
        parts.append(f"{stats.acceptance_length:.1f} tokens per round")
    if stopped:
        parts.append("stopped")
    elif last.finish_reason == "length":
        parts.append(pair.limit_reached(stats))
    return " · ".join(parts)
