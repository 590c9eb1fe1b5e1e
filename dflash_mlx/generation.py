"""The settings of a generation, checked in one place, and the request that they start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

from .conversation import Conversation
from .drafter.protocol import Drafter, check_pair, drafts_trees
from .drafter.protocol import block_size as drafter_block_size
from .errors import SettingsError
from .events import Stats
from .pair_caches import Caches
from .policy.draft_policy import DraftPolicy
from .policy.planner import AdaptivePlanner, Planner
from .prefix.store import PrefixStore
from .prompt import Prompt, branch_points, encode_prompt, thinking_variables
from .request import Request
from .sampling import Sampler
from .settings import RequestSettings, instance_of, setting, with_field_docs
from .stream import Detokenizer, TextStream, skip_text_start
from .targets import Target
from .validation import check_integer

DEFAULT_BLOCK_SIZE = 16  # rows of a step, without a policy and a size of the drafter
AUTO: Final = "auto"  # the value of `policy` and `tree_budget` that means: choose for me

Settings = ParamSpec("Settings")
T = TypeVar("T")


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class GenerationSettings(RequestSettings):
    """Everything a caller can set for one generation.

    Raises `SettingsError` for a value out of range or of a wrong type; `make_request` checks what
    belongs to the pair or to a `Conversation`.
    """

    policy: DraftPolicy | Literal["auto"] | None = setting(
        None,
        'Chooses the draft length of each step, unless `block_size` is given. "auto" makes one for '
        "this request; one of your own learns for later requests. None drafts a full block.",
        convert=lambda value: value if value == AUTO or isinstance(value, DraftPolicy) else None,
        allowed='None, "auto" or dm.DraftPolicy.of(target, drafter)',
    )
    conversation: Conversation | None = setting(
        None,
        "Keeps the caches for the next request, which then reads only its new tokens.",
        convert=instance_of(Conversation),
        allowed="None or dm.Conversation(...)",
    )
    prefix: PrefixStore | None = setting(
        None,
        "A `PrefixStore` of the pair, shared by many requests. A conversation has its own.",
        convert=instance_of(PrefixStore),
        allowed="None or dm.PrefixStore(target, drafter, memory=...)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conversation is not None and (self.prefix is not None or self.salt):
            name = "salt" if self.prefix is None else "prefix"
            raise SettingsError(f"{name}: give it to the Conversation instead.")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> GenerationSettings:
        """Make settings from a mapping. Raises `SettingsError` for an unknown name as well."""
        names = cls.__dataclass_fields__
        for name in settings:
            if name not in names:
                similar = get_close_matches(name, names, n=1)
                hint = "See help(dflash_mlx.generate)."
                if similar:
                    hint = f"Did you mean {similar[0]}?"
                raise SettingsError(f"There is no setting {name!r}. {hint}")
        return cls(**settings)


def with_settings(
    settings: Callable[Settings, GenerationSettings],
) -> Callable[
    [Callable[..., T]], Callable[Concatenate[Target, Drafter | None, Prompt, Settings], T]
]:
    """Show the settings in place of `**settings` to type checkers, `help` and `signature`."""

    def decorate(
        function: Callable[..., T],
    ) -> Callable[Concatenate[Target, Drafter | None, Prompt, Settings], T]:
        written = signature(function)
        parameters = [
            parameter
            for parameter in written.parameters.values()
            if parameter.kind is not Parameter.VAR_KEYWORD
        ]
        for parameter in signature(settings).parameters.values():
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        vars(function)["__signature__"] = written.replace(parameters=parameters)
        return function

    return decorate


def make_request(
    target: Target, drafter: Drafter | None, prompt: Prompt, settings: GenerationSettings
) -> Request:
    """Check a request and make its state. No forward runs, and no cache is filled yet.

    Args:
        target, drafter, prompt: as in `stream_generate`.
        settings: the settings of this request.

    Raises the errors that `stream_generate` raises immediately.
    """
    check_pair(target, drafter)
    policy = resolve_policy(target, drafter, settings.policy, trees=settings.tree_budget == AUTO)
    block_size = resolve_block_size(drafter, settings.block_size, policy)
    settings.check_vocabulary(target.vocab_size)
    tokenizer = target.tokenizer
    template = dict(settings.chat_template_kwargs or {})
    if settings.think is not None or settings.reasoning_effort is not None:
        template |= thinking_variables(tokenizer, settings.think, settings.reasoning_effort)
    ids = encode_prompt(target, prompt, template)
    conversation = settings.conversation
    if conversation is None:
        caches = Caches(
            target,
            drafter,
            kv_bits=settings.kv_bits,
            prefix=settings.prefix,
            salt=settings.salt,
        )
    else:
        conversation.check(target, drafter, settings.kv_bits)
        caches = conversation.caches
    planner = make_planner(target, drafter, settings=settings, policy=policy)
    sampler = Sampler(settings, ids)
    detokenizer = Detokenizer(tokenizer)
    if settings.continues:
        skip_text_start(detokenizer, tokenizer)
    text = TextStream(
        detokenizer,
        eos_ids=tokenizer.eos_token_ids,
        stop=settings.stop or (),
        max_tokens=min(settings.max_tokens, target.context_length - len(ids)),
        stop_applies=settings.stop_applies,
    )
    branches = settings.branches
    if branches is None and caches.prefix is not None:
        branches = branch_points(target, prompt, ids=ids, template=template)
    request = Request(
        caches,
        prompt=ids,
        sampler=sampler,
        planner=planner,
        text=text,
        stats=Stats(prompt_tokens=len(ids), block_size=block_size, seed=sampler.seed),
        branches=branches or (),
    )
    if conversation is not None:
        conversation.open(request)
    return request


def resolve_policy(
    target: Target,
    drafter: Drafter | None,
    policy: DraftPolicy | Literal["auto"] | None,
    trees: bool = False,
) -> DraftPolicy | None:
    """Return the policy that a setting selects. "auto" is a new one, if there is a drafter."""
    if policy != AUTO:
        return policy
    return None if drafter is None else DraftPolicy.of(target, drafter, trees=trees)


def make_planner(
    target: Target,
    drafter: Drafter | None,
    settings: GenerationSettings,
    policy: DraftPolicy | None,
) -> Planner:
    """Make the planner that a request's settings ask for.

    `tree_budget="auto"` drafts chains where the drafter or the target does not support trees.

    Raises `SettingsError` for a number as `tree_budget` and a drafter that drafts no trees, and
    `UnsupportedTreeError` for one and a target that cannot verify trees.
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
    """Return the most rows of a step.

    The policy decides it for a drafter that can draft any number of rows.

    Raises `SettingsError` for a size that the drafter was not made for.
    """
    if requested is not None:
        requested = check_integer("block_size", requested)
    if drafter is None:
        return 1
    largest = drafter_block_size(drafter)
    if requested is not None:
        if largest is not None and requested > largest:
            raise SettingsError(
                f"block_size {requested} is more than this drafter's {largest}: lower it."
            )
        return requested
    if largest is not None:
        return largest
    return DEFAULT_BLOCK_SIZE if policy is None else policy.block_size
