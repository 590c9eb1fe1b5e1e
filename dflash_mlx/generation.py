"""The settings of a generation, checked in one place, and the request that they start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

from .caches import Caches
from .conversation import Conversation
from .drafter.protocol import Drafter, check_pair, drafts_trees
from .drafter.protocol import block_size as drafter_block_size
from .errors import SettingsError
from .events import Stats
from .policy.draft_policy import DraftPolicy
from .policy.planner import AdaptivePlanner, Planner
from .prefix.store import PrefixStore
from .prompt import Prompt, branch_points, encode_prompt, thinking_variables
from .request import Request
from .sampling import Sampler
from .settings import RequestSettings, described, instance_of, setting
from .stream import Detokenizer, TextStream, skip_text_start
from .targets import Target
from .validation import check_integer

DEFAULT_BLOCK_SIZE = 16
AUTO: Final = "auto"

Settings = ParamSpec("Settings")
T = TypeVar("T")


@described
@dataclass(frozen=True, kw_only=True)
class GenerationSettings(RequestSettings):
    """Everything a caller can set for one generation.

    Raises `SettingsError` for a value out of range or of a wrong type; `make_request` checks what
    belongs to the pair or to a `Conversation`.
    """

    policy: DraftPolicy | Literal["auto"] | None = setting(
        None,
        'Chooses the draft length of each step, unless `block_size` is given. "auto" makes one for '
        "this request; one of your own learns for later requests. None drafts whole blocks.",
        form=lambda value: value if value == AUTO or isinstance(value, DraftPolicy) else None,
        allowed='None, "auto" or dm.DraftPolicy.of(target, drafter)',
    )
    conversation: Conversation | None = setting(
        None,
        "Keeps the caches for the next request, which then reads only its new tokens.",
        form=instance_of(Conversation),
        allowed="None or dm.Conversation(...)",
    )
    prefix: PrefixStore | None = setting(
        None,
        "A `PrefixStore` of the pair, shared by many requests. A conversation has its own.",
        form=instance_of(PrefixStore),
        allowed="None or dm.PrefixStore(target, drafter, memory=...)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conversation is not None and (self.prefix is not None or self.salt):
            name = "salt" if self.prefix is None else "prefix"
            raise SettingsError(f"{name}: give it to the Conversation, when that is made.")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> GenerationSettings:
        """Settings by name. Raises `SettingsError` for an unknown name too."""
        known = cls.__dataclass_fields__
        for name in settings:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"Did you mean {near[0]}?" if near else "See help(dflash_mlx.generate)."
                raise SettingsError(f"There is no setting {name!r}. {hint}")
        return cls(**settings)


def with_settings(
    settings: Callable[Settings, GenerationSettings],
) -> Callable[
    [Callable[..., T]], Callable[Concatenate[Target, Drafter | None, Prompt, Settings], T]
]:
    """Have type checkers, `help` and `signature` see the settings in place of `**settings`."""

    def decorate(
        function: Callable[..., T],
    ) -> Callable[Concatenate[Target, Drafter | None, Prompt, Settings], T]:
        written = signature(function)
        pair = [
            parameter
            for parameter in written.parameters.values()
            if parameter.kind is not Parameter.VAR_KEYWORD
        ]
        fields = signature(settings).parameters.values()
        named = [field.replace(kind=Parameter.KEYWORD_ONLY) for field in fields]
        vars(function)["__signature__"] = written.replace(parameters=[*pair, *named])
        return function

    return decorate


def make_request(
    target: Target, drafter: Drafter | None, prompt: Prompt, settings: GenerationSettings
) -> Request:
    """Check a request and make its state; no forward runs and no cache is filled yet.

    Args:
        target, drafter, prompt: as in `stream_generate`.
        settings: of this request.

    Raises what `stream_generate` raises at once.
    """
    check_pair(target, drafter)
    policy = policy_of(target, drafter, settings.policy, trees=settings.tree_budget == AUTO)
    block_size = resolve_block_size(drafter, settings.block_size, policy)
    settings.check_vocabulary(target.vocab_size)
    template = dict(settings.chat_template_kwargs or {})
    if settings.think is not None or settings.reasoning_effort is not None:
        wanted = settings.think, settings.reasoning_effort
        template |= thinking_variables(target.tokenizer, *wanted)
    ids = encode_prompt(target, prompt, template)
    kv_bits, conversation = settings.kv_bits, settings.conversation
    if conversation is None:
        caches = Caches(target, drafter, kv_bits, settings.prefix, settings.salt)
    else:
        conversation.check(target, drafter, kv_bits)
        caches = conversation.caches
    planner = make_planner(target, drafter, settings, policy)
    sampler = Sampler(settings, ids)
    tokenizer = target.tokenizer
    detokenizer = Detokenizer(tokenizer)
    if settings.continues:
        skip_text_start(detokenizer, tokenizer)
    max_tokens = min(settings.max_tokens, target.context_length - len(ids))
    ends, stop, applies = tokenizer.eos_token_ids, settings.stop or (), settings.stop_applies
    text = TextStream(detokenizer, ends, stop, max_tokens, applies)
    stats = Stats(prompt_tokens=len(ids), block_size=block_size, seed=sampler.seed)
    branches = settings.branches
    if branches is None and caches.prefix is not None:
        branches = branch_points(target, prompt, ids, template)
    request = Request(caches, ids, sampler, planner, text, stats, branches or ())
    if conversation is not None:
        conversation.open(request)
    return request


def policy_of(
    target: Target,
    drafter: Drafter | None,
    policy: DraftPolicy | Literal["auto"] | None,
    trees: bool = False,
) -> DraftPolicy | None:
    """The policy that a setting means for a pair: "auto" is a new one, if there is a drafter."""
    if policy != AUTO:
        return policy
    return None if drafter is None else DraftPolicy.of(target, drafter, trees=trees)


def make_planner(
    target: Target,
    drafter: Drafter | None,
    settings: GenerationSettings,
    policy: DraftPolicy | None,
) -> Planner:
    """The planner that a request's settings ask for, with this policy.

    Raises `SettingsError` for trees of a drafter that drafts none, and
    `UnsupportedTreeError` when the target cannot read them; "auto" is a chain then.
    """
    tree_budget = settings.tree_budget
    if tree_budget == AUTO:
        if drafter is not None and drafts_trees(drafter) and target.supports_trees:
            policy = policy or DraftPolicy.of(target, drafter, trees=True)
            if policy.trees is None:
                raise SettingsError('tree_budget "auto" needs DraftPolicy.of(..., trees=True).')
    elif tree_budget is not None:
        if not drafts_trees(drafter):
            raise SettingsError("tree_budget needs a drafter that drafts trees: leave it at None.")
        target.check_trees()
        return Planner(tree_budget)
    elif settings.block_size is not None:
        policy = None
    if policy is None or drafter is None:
        return Planner()
    return AdaptivePlanner(policy, settings.temperature)


def resolve_block_size(
    drafter: Drafter | None, requested: int | None = None, policy: DraftPolicy | None = None
) -> int:
    """The most rows of a step. Raises `SettingsError` for a size the drafter was not made for.

    A policy decides for a drafter that can draft any number of rows.
    """
    if requested is not None:
        requested = check_integer("block_size", requested)
    if drafter is None:
        return 1
    largest = drafter_block_size(drafter)
    if requested is None:
        return largest or (DEFAULT_BLOCK_SIZE if policy is None else policy.block_size)
    if largest is not None and requested > largest:
        raise SettingsError(
            f"block_size {requested} is more than the {largest} that this drafter can have: "
            "give less."
        )
    return requested
