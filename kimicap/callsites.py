"""Functions that a part of a model calls: where they are looked up, what stands in their place, where they are from."""

import inspect
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from kimicap.schema import Call


def functions_of(
    call: Call, host: torch.nn.Module, modelling: Any
) -> list[tuple[MutableMapping[str, Callable[..., Any]], str]]:
    """Where the call's functions are looked up: a namespace and a name each."""
    if call.method is not None:
        return [(vars(host), call.method)]
    if not call.attention:
        return [(vars(modelling), name) for name in call.functions]
    implementation = str(getattr(host.config, "_attn_implementation"))  # noqa: B009
    if implementation == "eager":
        return [(vars(modelling), "eager_attention_forward")]
    return [(modelling.ALL_ATTENTION_FUNCTIONS, implementation)]


@contextmanager
def replaced(namespace: MutableMapping[str, Any], name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another function under a name, the original back on leaving. Transformers' registry keeps local overrides."""
    local = getattr(namespace, "_local_mapping", namespace)
    original = local.get(name)
    namespace[name] = function
    try:
        yield
    finally:
        if original is None:
            del namespace[name]
        else:
            namespace[name] = original


def origin_of(function: Callable[..., Any]) -> str:
    """Module and name of the code behind a function; transformers hides the kernel it chose in a closure."""
    inner = function
    while hasattr(inner, "__wrapped__") or inspect.isfunction(inner):
        hidden = inspect.getclosurevars(inner).nonlocals.get("implementation") if inspect.isfunction(inner) else None
        if hidden is not None:
            inner = hidden
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            break
    return f"{inner.__module__}.{getattr(inner, '__name__', type(inner).__name__)}"
