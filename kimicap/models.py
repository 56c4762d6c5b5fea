"""Models and tokenizers: read a config without torch, load a model, tell its family."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimicap import expressions
from kimicap.architecture import Architecture, family_of_config, read_architecture
from kimicap.config import Settings
from kimicap.errors import RoomError, UsageError
from kimicap.fingerprint import folder_digest
from kimicap.schema import Schema
from kimicap.tokens import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    import torch


def architecture_of(settings: Settings, schema: Schema) -> Architecture:
    """The architecture of the model that the settings name, from its config alone.

    A local config.json that spells out every size is read as it is; otherwise transformers fills in its defaults.

    Raises:
        UsageError: No config is found, or no family of the schema covers it.
    """
    raw = _local_config(settings)
    if raw is not None:
        try:
            return _architecture(settings, schema, raw)
        except expressions.MissingKey:
            pass  # the file leaves a size to transformers' defaults
    config = _transformers_config(settings)
    try:
        return _architecture(settings, schema, config.to_dict())
    except expressions.MissingKey as error:
        raise UsageError(
            f"The config of {settings.model} lacks {error}, which the schema needs for its sizes; "
            "choose another model or mend the schema."
        ) from None


def own_code(settings: Settings, config: Mapping[str, Any]) -> str | None:
    """Name of the checkpoint's own modelling file, or None if transformers' code will run."""
    named = config.get("auto_map") or {}
    if not settings.trust_remote_code or "AutoModelForCausalLM" not in named:
        return None
    return str(named["AutoModelForCausalLM"]).split("--")[-1].split(".")[0]


def model_digest(settings: Settings) -> str:
    """What tells the model from another under the same name: the hub's commit, or a digest of the folder's files.

    Raises:
        UsageError: They cannot be read.
    """
    folder = Path(settings.model)
    if folder.is_dir():
        try:
            return folder_digest(
                folder,
                weights=not settings.random_weights,
                code=settings.trust_remote_code,
                generates=settings.generate > 0,
            )
        except OSError as error:
            raise UsageError(f"The model's {error.filename} cannot be read: {error.strerror}. Mend it.") from None
    with _sentences(settings.model, "model", "check --model (a hub id or a local folder)"):
        from transformers.utils import cached_file, extract_commit_hash

        return str(extract_commit_hash(cached_file(settings.model, "config.json", revision=settings.revision), None))


def load_tokenizer(settings: Settings) -> Tokenizer:
    """The tokenizer named, or the model's own.

    Raises:
        UsageError: There is none.
    """
    if settings.tokenizer == "bytes":
        return ByteTokenizer()
    name = settings.tokenizer or settings.model
    from transformers import AutoTokenizer

    revision = settings.revision if settings.tokenizer is None else None
    with _sentences(name, "tokenizer", "name another with --tokenizer (`bytes` needs no files)"):
        found: Tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=settings.trust_remote_code
        )
    return found


def load_model(settings: Settings, architecture: Architecture) -> "torch.nn.Module":
    """The model, in eval mode, on its device, without gradients.

    Raises:
        UsageError: No weights, a device or implementation that is not there, or code of another family than the
            config says.
        RoomError: It does not fit on the device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = _device(settings.device)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if settings.attention is not None:
        options["attn_implementation"] = settings.attention
    if settings.experts is not None:
        options["experts_implementation"] = settings.experts
    remedy = "check --model, or build it from its config with --random-weights"
    try:
        with _sentences(settings.model, "model", remedy):
            if settings.random_weights:
                config = _transformers_config(settings)
                dtype = config.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
                torch.manual_seed(settings.seed)
                with torch.device(device):
                    model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32, **options)
            else:
                if settings.device_map is not None:
                    options["device_map"] = settings.device_map
                model = _pretrained(settings, options)
                if settings.device_map is None:
                    model = model.to(device)
    except torch.OutOfMemoryError:
        raise RoomError(
            f"The model {settings.model} does not fit on {device}; spread it with --device-map auto, or use a smaller "
            "--dtype."
        ) from None
    check_class(model, architecture)
    _unpack(model)
    _set_attention(model.get_submodule(architecture.match.inside), settings.attention)
    bring_in_uncalled(model, architecture)
    found: torch.nn.Module = model.requires_grad_(False).eval()
    return found


def _unpack(model: Any) -> None:
    """Unpacks weights that compressed-tensors would unpack when the whole model is first called.

    Captures call parts of it alone, whose experts would have no weights. All come out as bfloat16.
    """
    if not hasattr(model, "ct_decompress_hook"):
        return
    model.hf_quantizer.compressor.decompress_model(model)
    for module in model.modules():
        if hasattr(module, "quantization_scheme") and module.weight.dtype != model.dtype:
            module.to(model.dtype)


def _pretrained(settings: Settings, options: Mapping[str, Any]) -> Any:
    """The checkpoint's model. Transformers gives weights that it lacks random numbers, and goes on.

    Raises:
        UsageError: The checkpoint lacks weights, or has them in other shapes than the config says.
    """
    import torch
    from transformers import AutoModelForCausalLM

    dtype = "auto" if settings.dtype == "auto" else getattr(torch, settings.dtype)
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            settings.model,
            revision=settings.revision,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UsageError(
            f"The weights of {settings.model} do not fit its config, or some are missing; download the checkpoint "
            "again, or mend its config.json."
        ) from error
    odd = {
        "lacks": sorted(told["missing_keys"]),
        "has other shapes than its config says for": sorted(key for key, *_ in told["mismatched_keys"]),
    }
    for what, names in odd.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UsageError(
                f"The checkpoint {settings.model} {what} {', '.join(names[:3])}{more}, which would be random numbers; "
                "download it again, or mend its config.json."
            )
    return model


def _device(name: str | None) -> "torch.device":
    """The device of that name; a GPU if there is one where none is named."""
    import torch

    gpus = torch.cuda.device_count()
    try:
        device = torch.device(name or ("cuda" if gpus else "cpu"))
    except RuntimeError:
        raise UsageError(f"--device {name!r} is not a device; write cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and (device.index or 0) >= gpus:
        seen = f"{gpus} GPU(s), numbered from 0" if gpus else "no GPU"
        raise UsageError(f"--device {name!r} is not there: torch sees {seen}; choose another, or cpu.")
    try:
        # Only a try tells whether this build of torch, and this machine, has it.
        there = device.type != "meta" and torch.empty(0, device=device) is not None
    except (RuntimeError, AssertionError, NotImplementedError):
        there = False
    if not there:
        raise UsageError(f"--device {name!r} is not there: torch cannot compute on it; write cpu, cuda or cuda:N.")
    return device


def check_class(model: "torch.nn.Module", architecture: Architecture) -> None:
    """Refuses a model of another class or modelling code than the family's.

    Raises:
        UsageError: It is another.
    """
    family, match, found = architecture.family, architecture.match, type(model)
    if not match.fits(found):
        raise UsageError(
            f"The model is a {found.__name__} of {found.__module__}, where the family {family.name} expects a "
            f"{match.class_name} of {match.module}; the schema does not fit it."
        )


def _set_attention(model: Any, wanted: str | None) -> None:
    """Undoes what checkpoints' own code forces: an attention implementation not asked for, or not installed."""
    from transformers.utils import is_flash_attn_2_available

    forced = model.config._attn_implementation
    if wanted is None and forced == "flash_attention_2" and not is_flash_attn_2_available():
        wanted = "eager"
    if wanted is not None and wanted != forced:
        model.config._attn_implementation = wanted


def bring_in_uncalled(model: "torch.nn.Module", architecture: Architecture) -> None:
    """Loads offloaded weights of modules that the model reads but never calls.

    Accelerate brings a module's weights when it is called; the code of a model that hands weights to a function
    would find none. They are small (a vector each), and stay on their device from here on.
    """
    inner = model.get_submodule(architecture.match.inside)
    for part, sites in architecture.family.sites.items():
        for site in sites.values():
            if site.module is None:
                continue
            path = f"{architecture.family.parts[part].module}.{site.module}"
            for block in architecture.blocks[part] or (None,):
                module = inner.get_submodule(path.format(layer=block))
                hook: Any = getattr(module, "_hf_hook", None)
                if hook is not None and any(weight.is_meta for weight in module.parameters()):
                    hook.pre_forward(module)


def versions() -> dict[str, str]:
    """Versions of the packages that decide what the values are; empty for one that is not there."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers", "fla-core", "flash-linear-attention"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _architecture(settings: Settings, schema: Schema, config: Mapping[str, Any]) -> Architecture:
    family = family_of_config(schema, config, code=own_code(settings, config), model=settings.model)
    return read_architecture(family, config)


def _local_config(settings: Settings) -> dict[str, Any] | None:
    """config.json of a local folder; None if the model is not a local folder."""
    folder = Path(settings.model)
    if not folder.is_dir():
        if folder.is_absolute() or settings.model.startswith((".", "~")):
            raise UsageError(f"The model folder {settings.model} is not there; check --model.")
        return None
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"The model folder {settings.model} holds no config.json; check --model.") from None
    except ValueError as error:
        raise UsageError(f"{folder / 'config.json'} is not valid JSON ({error}); mend it.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{folder / 'config.json'} holds no table of settings; mend it.")
    return found


def _transformers_config(settings: Settings) -> Any:
    from transformers import AutoConfig

    with _sentences(settings.model, "model", "check --model (a hub id or a local folder)"):
        return AutoConfig.from_pretrained(
            settings.model, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )


@contextmanager
def _sentences(name: str, what: str, remedy: str) -> Iterator[None]:
    """Turns what transformers raises into a sentence; neither tokens nor environment get into it."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    _quieten()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (OSError, ValueError, ImportError, KeyError, StrictDataclassError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".,")[:300]
        if "does not recognize this architecture" in reason:
            remedy = (
                "install transformers 5.17 or newer, or give a checkpoint with its own code and --trust-remote-code"
            )
        elif "requires `accelerate`" in reason:
            remedy = "install kimicap[offload], or leave out --device-map"
        elif "couldn't connect" in reason:
            remedy = "check the name and the connection, or give a local folder"
        elif "attn_implementation" in reason or "FlashAttention" in reason:
            remedy = "choose another --attention"
        elif "experts_implementation" in reason:
            remedy = "choose another --experts"
        raise UsageError(f"The {what} {name} cannot be loaded: {reason}. To mend it, {remedy}.") from error


def _quieten() -> None:
    """No progress bars and no log lines of transformers, here and in forwards; errors are told in sentences."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
