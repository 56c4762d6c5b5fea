"""Every setting of a run as a flag of the command line."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from kimicap.config import Settings


def option(name: str, kind: Any, default: Any, about: str, *flags: str, metavar: str | None = None) -> Any:
    """A keyword parameter that typer reads as an option."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(*flags, help=about, metavar=metavar)],
    )


def setting_options() -> Iterator[inspect.Parameter]:
    """A flag a setting, all of them None where they are not given, so that they leave the config file alone."""
    for field_name, field in Settings.model_fields.items():
        name = field.alias or field_name
        kebab = name.replace("_", "-")
        # What comes as text and is parsed by the setting itself (sizes like 4GiB) is text here.
        parsed = any(hasattr(item, "func") for item in field.metadata)
        kind, choices = _kind(field.annotation, parsed=parsed)
        about = field.description or ""
        if field.default is not None and not field.is_required() and kind is not bool:
            default = f"{field.default / 2**30:g}GiB" if parsed and kind is str else field.default
            about += f" [default: {default}]"
        flag = f"--{kebab}/--no-{kebab}" if kind is bool else f"--{kebab}"
        yield option(name, kind | None, None, about, flag, metavar=choices)


def _kind(annotation: Any, *, parsed: bool) -> tuple[Any, str | None]:
    """What typer parses for a setting's type, and what `--help` calls it; `load_settings` checks the rest."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0], parsed=parsed)
    if get_origin(annotation) in (Union, UnionType):
        return _kind(next(kind for kind in get_args(annotation) if kind is not type(None)), parsed=parsed)
    if get_origin(annotation) is Literal:
        return str, "|".join(get_args(annotation))
    if get_origin(annotation) is list:
        return list[str], "V[,V...]"
    if annotation in (bool, float) or (annotation is int and not parsed):
        return annotation, None if annotation is bool else "NUMBER"
    return str, "SIZE" if annotation is int else "PATH" if annotation is Path else "TEXT"
