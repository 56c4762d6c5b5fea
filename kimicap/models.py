"""Models and tokenizers: read a config without torch, load a model, tell its family."""

import importlib.util
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


def uses_remote_code(settings: Settings, config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint's own modelling code will run."""
    return settings.trust_remote_code and "auto_map" in config


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
                dtype = "auto" if settings.dtype == "auto" else getattr(torch, settings.dtype)
                model = AutoModelForCausalLM.from_pretrained(
                    settings.model, revision=settings.revision, dtype=dtype, **options
                )
                if settings.device_map is None:
                    model = model.to(device)
    except torch.OutOfMemoryError:
        raise RoomError(
            f"The model {settings.model} does not fit on {device}; spread it with --device-map auto, or use a smaller "
            "--dtype."
        ) from None
    check_class(model, architecture)
    found: torch.nn.Module = model.requires_grad_(False).eval()
    return found


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
    return device


def check_class(model: "torch.nn.Module", architecture: Architecture) -> None:
    """Refuses a model of another class or modelling code than the family's.

    Raises:
        UsageError: It is another.
    """
    family, found = architecture.family, type(model)
    if found.__name__ != family.class_name or not found.__module__.startswith(family.module):
        raise UsageError(
            f"The model is a {found.__name__} of {found.__module__}, where the family {family.name} expects a "
            f"{family.class_name} of {family.module}; the schema does not fit it."
        )


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
    remote = uses_remote_code(settings, config)
    family = family_of_config(schema, config, remote_code=remote, model=settings.model)
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
        reason = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")[:300]
        raise UsageError(f"The {what} {name} cannot be loaded: {reason}. To mend it, {remedy}.") from error


def _quieten() -> None:
    """No progress bars and no log lines of transformers, here and in forwards; errors are told in sentences."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def has_accelerate() -> bool:
    """Whether accelerate is installed, which device maps need."""
    return importlib.util.find_spec("accelerate") is not None
