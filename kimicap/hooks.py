"""The registrar: plain PyTorch hooks on a loaded model, and recording wrappers at its call sites.

Everything is attached inside a ``with`` and taken away on every exit. Hooks return None, so the model's outputs
stay bit for bit what they are without.
"""

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kimicap import computed, expressions
from kimicap.architecture import Architecture, Want
from kimicap.callsites import functions_of, origin_of, replaced
from kimicap.errors import UsageError
from kimicap.pieces import Piece, pick_heads
from kimicap.reading import argument_of, item_of, own_layout
from kimicap.rows import Rows, to_layout
from kimicap.schema import Call, Site
from kimicap.selection import position_axis

Sink = Callable[[str, int | None, Piece], None]
"""Takes a value's dotted name, the block (None for values of the whole model) and a piece of it."""


class Recorder:
    """Reads the sites that some wants need, and hands pieces of their rows to a sink, during forwards.

    Set `rows` before each forward. Tensors handed over are the model's own: read them before the forward ends,
    or on the same stream.

    Attributes:
        rows: The rows of the coming forward.
        fired: Pairs of value and block that have been handed over since it was last cleared.
        dtypes: The dtype in which the model had each value.
        kernels: Functions seen at each call site, with where they come from.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        architecture: Architecture,
        wants: Sequence[Want],
        sink: Sink,
        *,
        fast: bool = False,
        together: bool = False,
    ) -> None:
        self._together = together
        self._fast = fast
        self._sites = {
            part: {name: site.fast if fast and site.fast else site for name, site in sites.items()}
            for part, sites in architecture.family.sites.items()
        }
        self.rows = Rows(width_tokens=0, starts=(), counts=(), past=())
        self.fired: set[tuple[str, int | None]] = set()
        self.dtypes: dict[str, str] = {}
        self.kernels: dict[str, str] = {}
        self._model = model.get_submodule(architecture.match.inside)
        self._architecture, self._sink = architecture, sink
        self._wants = {(site.part, site.name): want for want in wants for site in architecture.sites(want.value)}
        self._paused = False
        self._running: dict[str, int | None] = {}
        self._found: dict[tuple[str, int | None], dict[str, Any]] = defaultdict(dict)
        self._computed: dict[tuple[str, int | None], list[Site]] = {}
        self._ingredients: set[tuple[str, str]] = set()
        self._modules: dict[tuple[str, int | None], dict[str, torch.nn.Module]] = {}
        self._hosts: dict[tuple[str, int | None], torch.nn.Module] = {}
        self._called: dict[tuple[str, int | None], list[Site]] = {}

    @contextmanager
    def attached(self) -> Iterator["Recorder"]:
        """Attaches every hook and wrapper that is needed, and takes them all away on leaving.

        Raises:
            UsageError: A site does not fit the loaded model.
        """
        with ExitStack() as stack:
            for part, block in self._places():
                self._attach(stack, part, block)
            yield self

    @contextmanager
    def paused(self, paused: bool = True) -> Iterator[None]:
        """Forwards inside pass unread (or, with False, are read as ever)."""
        before, self._paused = self._paused, paused or self._paused
        try:
            yield
        finally:
            self._paused = before

    def missing(self) -> list[tuple[str, int | None]]:
        """Wanted values and blocks that have not fired, but for those that may be absent."""
        expected = {
            (want.value.key, block)
            for (part, name), want in self._wants.items()
            if not self._sites[part][name].absent
            for block in self._blocks(want, part)
        }
        return sorted(expected - self.fired, key=str)

    def _places(self) -> list[tuple[str, int | None]]:
        places = {(part, block) for (part, _), want in self._wants.items() for block in self._blocks(want, part)}
        return sorted(places, key=str)

    def _blocks(self, want: Want, part: str) -> list[int | None]:
        if want.value.host == "model":
            return [None]
        return [block for block in want.blocks if block in self._architecture.blocks[part]]

    def _needed(self, part: str, block: int | None) -> list[Site]:
        """Sites of a part that must be read in a block: the values wanted, and what they are computed from."""
        sites = self._sites[part]
        names = [n for (p, n), want in self._wants.items() if p == part and block in self._blocks(want, part)]
        needed: dict[str, Site] = {}
        while names:
            name = names.pop()
            if name not in needed:
                needed[name] = sites[name]
                names += sites[name].inputs.values()
        return list(needed.values())

    def _attach(self, stack: ExitStack, part: str, block: int | None) -> None:
        row = self._architecture.family.parts[part]
        path = row.module.format(layer=block)
        host = self._module(path, what=f"part {part}")
        if type(host).__name__ != row.class_name:
            raise UsageError(
                f"{path} is a {type(host).__name__}, where the schema's part {part} expects a {row.class_name}; "
                "the schema does not fit this model."
            )
        stack.callback(host.register_forward_pre_hook(self._enter(part, block)).remove)
        needed = self._needed(part, block)
        self._hosts[part, block] = host
        self._computed[part, block] = [site for site in needed if site.compute is not None]
        self._ingredients |= {(part, name) for site in needed for name in site.inputs.values()}
        self._modules[part, block] = {
            site.name: self._module(f"{path}.{site.module}", what=f"site of {site.name}")
            for site in needed
            if site.module is not None
        }
        for site in needed:
            if site.input is not None or site.output is not None:
                self._hook(stack, site, host, path, block)
        self._called[part, block] = [site for site in needed if site.call is not None]
        for name in sorted({site.call for site in needed if site.call is not None}):
            self._wrap_call(stack, self._architecture.family.calls[name], host)
        # Last, so that what the part's own output completes is computed before its ingredients are let go.
        stack.callback(host.register_forward_hook(self._leave(part, block), always_call=True).remove)

    def _module(self, path: str, *, what: str) -> torch.nn.Module:
        module = self._model
        for name in [] if path == "." else path.split("."):
            found = getattr(module, name, None)
            if not isinstance(found, torch.nn.Module):
                names = ", ".join(child for child, _ in module.named_children())
                raise UsageError(
                    f"The {what} lies at {path}, but {type(module).__name__} has no module {name!r} (it has {names}); "
                    "the schema does not fit this model."
                )
            module = found
        return module

    def _hook(self, stack: ExitStack, site: Site, host: torch.nn.Module, path: str, block: int | None) -> None:
        relative = site.input or site.output or "."
        inner = path if relative == "." else relative if path == "." else f"{path}.{relative}"
        module = self._module(inner, what=f"site of {site.name}")
        where = f"{site.name} at {inner}"
        names = tuple(inspect.signature(module.forward).parameters)

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._paused:
                self._read(site, block, argument_of(site.argument, names, args, kwargs, where), where)

        def after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._paused:
                return
            if site.whole:
                self._read(site, block, (module, {**dict(zip(names, args, strict=False)), **kwargs}), where)
            else:
                self._read(site, block, item_of(site.item, output, where), where)

        if site.input is not None:
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
        else:
            handle = module.register_forward_hook(after, with_kwargs=True)
        stack.callback(handle.remove)

    def _enter(self, part: str, block: int | None) -> Callable[..., None]:
        def enter(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            self._running[part] = block

        return enter

    def _leave(self, part: str, block: int | None) -> Callable[..., None]:
        def leave(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._running.pop(part, None)
            self._found.pop((part, block), None)

        return leave

    def _wrap_call(self, stack: ExitStack, call: Call, host: torch.nn.Module) -> None:
        """Puts a recording wrapper in the place of each of the call's functions, once for all blocks."""
        modelling = sys.modules[type(host).__module__]
        for namespace, name in functions_of(call, host, modelling):
            original = namespace.get(name) if call.method is None else getattr(host, name, None)
            if original is None:
                where = modelling.__name__ if call.method is None else type(host).__name__
                raise UsageError(
                    f"{where} has no function {name!r}, where the schema has the call {call.name}; "
                    "the schema does not fit this model."
                )
            if (self, call.name) in getattr(original, "recorders", ()):
                continue
            stack.enter_context(replaced(namespace, name, self._wrapper(call, name, original)))

    def _wrapper(self, call: Call, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        names, origin = tuple(inspect.signature(original).parameters), origin_of(original)
        fast = call.fast.get(name, {}) if self._fast else {}
        ask = {**call.ask, **fast}

        def recording(*args: Any, **kwargs: Any) -> Any:
            if self._paused or call.part not in self._running:
                return original(*args, **kwargs)
            block = self._running[call.part]
            if not self._is_meant(call, block, names, args, kwargs):
                return original(*args, **kwargs)
            output = original(*args, **{**kwargs, **ask})
            if fast and len(output) == call.returns:
                raise UsageError(
                    "--states fast needs flash-linear-attention's kernels, but the model runs without them; install "
                    "flash-linear-attention and run on a GPU, or use --states exact."
                )
            ran = self.kernels.get(call.name, origin)
            self.kernels[call.name] = ran if origin in ran.split("; ") else f"{ran}; {origin}"
            for site in self._called.get((call.part, block), ()):
                if site.call == call.name:
                    where = f"{site.name} at the call {call.name} of block {block}"
                    if site.whole:
                        given = {**dict(zip(names, args, strict=False)), **kwargs}
                        found: Any = (original, [given[name] for name in names if name in given])
                    elif site.argument is not None:
                        found = argument_of(site.argument, names, args, kwargs, where)
                    else:
                        results = (output,) if isinstance(output, torch.Tensor) else output
                        # Functions that --states fast asks for no more return no more.
                        more = call.returns is not None and (site.result or 0) >= call.returns
                        found = None if more and not fast else item_of(site.result, results, where)
                    self._read(site, block, found, where)
            return output if call.returns is None else output[: call.returns]

        # Other calls may wrap the same function: signature and origin are those of the innermost.
        recording.__wrapped__ = original  # type: ignore[attr-defined]
        recording.recorders = (*getattr(original, "recorders", ()), (self, call.name))  # type: ignore[attr-defined]
        return recording

    def _is_meant(
        self, call: Call, block: int | None, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether the arguments are the modules that the call's ``where`` names."""
        host = self._hosts[call.part, block]
        return all(
            argument_of(argument, names, args, kwargs, call.name) is host.get_submodule(path)
            for argument, path in call.where.items()
        )

    def _read(self, site: Site, block: int | None, raw: Any, where: str) -> None:
        """Takes what a site gave: hands the value over if it is wanted, and computes what it completes."""
        if raw is None and not site.absent:
            raise UsageError(f"{where}: expected a tensor, found None; the schema does not fit this model.")
        want = self._wants.get((site.part, site.name))
        tensor = raw
        if isinstance(raw, torch.Tensor) and site.axes is not None:
            layout = want.value.layout if want is not None else site.layout or own_layout(site.axes)
            if site.cut is not None:
                raw = raw.narrow(site.axes.index(site.cut), 0, self._size(site.part, site.cut))
            tensor = self._laid_out(raw.clone() if site.overwritten else raw, site.axes, layout, site.part, where)
        if want is not None and tensor is not None and block in self._blocks(want, site.part):
            if site.keep != "first" or self.rows.first:
                self._hand_over(want, block, tensor, self.rows.kept if "kept" in (site.axes or ()) else self.rows)
        if (site.part, site.name) in self._ingredients:
            found = self._found[site.part, block]
            found[site.name] = tensor
            self._compute(site.part, block, found, site.name)

    def _laid_out(
        self, raw: torch.Tensor, axes: Sequence[str], layout: Sequence[str], part: str, where: str
    ) -> torch.Tensor:
        return to_layout(raw, axes, layout, self.rows, lambda dim: self._size(part, dim), where)

    def _size(self, part: str, dim: str) -> int:
        return self._architecture.size(self._architecture.family.parts[part].host, dim)

    def _compute(self, part: str, block: int | None, found: dict[str, Any], latest: str) -> None:
        there = {**self._modules[part, block], **found}
        pending = [
            site
            for site in self._computed[part, block]
            if latest in site.inputs.values() and all(name in there for name in site.inputs.values())
        ]
        for site in pending:
            want = self._wants.get((part, site.name))
            ingredients = {key: there[name] for key, name in site.inputs.items()}
            config = self._architecture.config
            numbers = {key: expressions.first(number, config) for key, number in site.numbers.items()}
            with self.paused():
                result = computed.FUNCTIONS[site.compute or ""](want, self.rows, **ingredients, **numbers)
                one = result is None or isinstance(result, torch.Tensor)
                if want is not None and not one:
                    for piece in result:
                        self._give(want.value.key, block, piece)
                    self.fired.add((want.value.key, block))
            if one:  # a value like any other, and perhaps an ingredient
                self._read(site, block, result, f"{site.name} of block {block}")

    def _hand_over(self, want: Want, block: int | None, tensor: torch.Tensor, rows: Rows) -> None:
        """Cuts ``[batch, *layout]`` into rows, each narrowed to its own tokens and the positions and heads wanted."""
        layout, key = want.value.layout, want.value.key
        axis = position_axis(want.value)
        head = layout.index("head") if "head" in layout else None
        alike = rows.alike and len(rows.counts) > 1
        for row, (start, count, past) in enumerate(zip(rows.starts, rows.counts, rows.past, strict=True)):
            if not count or (alike and row):
                continue
            piece, slot, lead = (tensor, 0, 1) if alike else (tensor[row], 0, 0)
            several = len(rows.counts) if alike else None
            if axis is not None:
                positions = want.request.positions
                offset, number, slot = positions.window(past, count, past + count)
                if not number:
                    continue
                place, first = lead + layout.index(axis), start + offset
                piece = piece.narrow(place, first, (number - 1) * positions.step + 1)
                if positions.step > 1:
                    piece = piece[(slice(None),) * place + (slice(None, None, positions.step),)]
            if head is not None:
                piece = pick_heads(piece, want, lead + head)
            if want.request.top is None:
                self._give(key, block, Piece(row=row, rows=several, tensor=piece, slot=slot))
            else:
                largest = piece.float().topk(want.request.top, dim=-1)
                kept = piece.gather(-1, largest.indices)
                self._give(key, block, Piece(row=row, rows=several, tensor=kept, slot=slot), "_top")
                self._give(key, block, Piece(row=row, rows=several, tensor=largest.indices, slot=slot), "_top_ids")
        self.fired.add((key, block))
        self.dtypes[key] = str(tensor.dtype).removeprefix("torch.")

    def _give(self, key: str, block: int | None, piece: Piece, suffix: str = "") -> None:
        self.fired.add((key, block))
        self.dtypes.setdefault(key + suffix, str(piece.tensor.dtype).removeprefix("torch."))
        for part in (piece,) if self._together else piece.split():
            self._sink(key + suffix, block, part)
