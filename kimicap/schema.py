"""schema.yaml as frozen rows: what can be captured, and where each family of models has it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kimicap.errors import UsageError
from kimicap.schema_check import problems_of

BUILT_IN = Path(__file__).with_name("schema.yaml")


@dataclass(frozen=True, kw_only=True)
class Value:
    """One named tensor of the forward pass.

    Attributes:
        layout: Dimension names, without ``layer`` and ``sequence``.
        dtype: ``computed``, ``float32``, ``index``, ``int32`` or ``bool``.
        about: One sentence for people; the array's ``long_name``.
    """

    host: str
    name: str
    layout: tuple[str, ...]
    dtype: str
    about: str

    @property
    def key(self) -> str:
        """The dotted name, ``"mlp.router_logits"``."""
        return f"{self.host}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where one value (or, with a leading underscore, an ingredient) is read. Fields as in schema.yaml."""

    name: str
    part: str
    input: str | None = None
    output: str | None = None
    call: str | None = None
    compute: str | None = None
    module: str | None = None
    batch: str | None = None
    argument: str | int | None = None
    item: str | int | None = None
    result: int | None = None
    inputs: Mapping[str, str]
    numbers: Mapping[str, tuple[str, ...]]
    axes: tuple[str, ...] | None = None
    layout: tuple[str, ...] | None = None
    about: str | None = None
    cut: str | None = None
    absent: bool = False
    whole: bool = False
    keep: str = "last"
    overwritten: bool = False
    fast: "Site | None" = None

    def __str__(self) -> str:
        """How the site is named in errors and in the array's ``site`` attribute."""
        if self.compute is not None:
            return f"{self.compute}({', '.join(self.inputs.values())})"
        if self.batch is not None:
            return f"batch {self.batch}"
        where = f"{self.part} {self.call or self.input or self.output or self.module}"
        what = "argument" if self.argument is not None else "input" if self.input else "output"
        which = next((str(x) for x in (self.argument, self.item, self.result) if x is not None), "")
        return f"{where} {what} {which}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kind of module that hosts values: where it lies and in which blocks the config says it is."""

    name: str
    host: str
    module: str
    class_name: str
    blocks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function or method that a part's forward calls. Fields as in schema.yaml."""

    name: str
    part: str
    functions: tuple[str, ...]
    method: str | None
    attention: bool
    where: Mapping[str, str]
    ask: Mapping[str, Any]
    fast: Mapping[str, Mapping[str, Any]]
    returns: int | None


@dataclass(frozen=True, kw_only=True)
class Match:
    """By what a family's models are known.

    Attributes:
        class_name: Class of the model.
        module: Beginning of the module that the class is from.
        model_type: As config.json has it.
        code: Name of the checkpoint's own modelling file, or None for transformers' own code.
        inside: Path of the module in the model to which the family's paths are relative.
        config: Key of config.json under which that module's config lies.
    """

    class_name: str
    module: str
    model_type: str
    code: str | None
    inside: str
    config: str | None

    def fits(self, found: type) -> bool:
        """Whether a model of class ``found`` is meant."""
        module = found.__module__
        ours = module == self.module or module.startswith(f"{self.module}.")
        return found.__name__ == self.class_name and ours and self.code in (None, module.rpartition(".")[2])


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a mixture chooses its experts: the largest of sigmoid(logits) + bias.

    Attributes:
        part: The mixture.
        bias: Path of the selection bias from the part's module, a tensor ``[expert]``.
        groups: Expression for the groups among which experts are chosen first; 1 for none.
        renormalise: Expression for whether the chosen sigmoids are divided by their sum.
        scaling: Expression for the factor of the weights.
    """

    part: str
    bias: str
    groups: tuple[str, ...]
    renormalise: tuple[str, ...]
    scaling: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """The rows that hold for one modelling code."""

    name: str
    about: str
    matches: tuple[Match, ...]
    trunk: str
    head: frozenset[str]
    layers: tuple[str, ...]
    sizes: Mapping[str, tuple[str, ...]]
    parts: Mapping[str, Part]
    calls: Mapping[str, Call]
    sites: Mapping[str, Mapping[str, Site]]
    invariants: frozenset[str]
    router: Router | None

    def sites_of(self, value: Value) -> list[Site]:
        """The sites of a value, one a part of its host that has it."""
        found = (
            self.sites.get(name, {}).get(value.name) for name, part in self.parts.items() if part.host == value.host
        )
        return [site for site in found if site is not None]

    def needs_head(self, value: Value) -> bool:
        """Whether a value wants the language-model head."""
        return value.host == "model" and value.name in self.head


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The whole schema, checked."""

    dimensions: Mapping[str, str]
    short_names: Mapping[str, str]
    values: Mapping[str, Value]
    families: Mapping[str, Family]


def load_schema(extra: Path | None = None) -> Schema:
    """The built-in schema, with the rows of a person's own file laid over it.

    Raises:
        UsageError: The file is not there, is not YAML, or has problems; all of them are listed, each with its path.
    """
    tree = _read(BUILT_IN)
    source = BUILT_IN.name
    if extra is not None:
        tree, source = _overlay(tree, _read(extra)), str(extra)
    problems = problems_of(tree)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UsageError(f"The schema in {source} has {len(problems)} problem(s); mend them:\n{lines}")
    return _build(tree)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The schema file {path} cannot be read ({error.strerror}); check the path.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"The schema file {path} is not valid YAML; mend it: {error}") from None
    if not isinstance(tree, dict):
        raise UsageError(f"The schema file {path} holds no rows; it needs at least `values:` or `families:`.")
    return tree


def _overlay(below: Any, above: Any) -> Any:
    """``above`` laid over ``below``: mappings are merged key by key, but a site is replaced as a whole."""
    if not (isinstance(below, dict) and isinstance(above, dict)) or _is_leaf(above):
        return above
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _overlay(below[key], value) if key in below else value
    return merged


def _is_leaf(row: dict[str, Any]) -> bool:
    return any(key in row for key in ("input", "output", "call", "compute", "module", "batch"))


def _build(tree: Mapping[str, Any]) -> Schema:
    values = {}
    for host, rows in tree["values"].items():
        for name, row in rows.items():
            value = Value(
                host=host,
                name=name,
                layout=tuple(row["layout"]),
                dtype=row["dtype"],
                about=" ".join(row["about"].split()),
            )
            values[value.key] = value
    families = {name: _family(name, row) for name, row in tree["families"].items()}
    return Schema(dimensions=tree["dimensions"], short_names=tree["short_names"], values=values, families=families)


def _family(name: str, row: Mapping[str, Any]) -> Family:
    matches = row["match"] if isinstance(row["match"], list) else [row["match"]]
    parts = {
        key: Part(
            name=key,
            host=part["host"],
            module=part["module"],
            class_name=part["class"],
            blocks=_many(part.get("blocks", ())),
        )
        for key, part in row["parts"].items()
    }
    calls = {
        key: Call(
            name=key,
            part=call["part"],
            functions=tuple(call.get("functions", ())),
            method=call.get("method"),
            where=call.get("where", {}),
            attention=call.get("attention", False),
            ask=call.get("ask", {}),
            fast=call.get("fast", {}),
            returns=call.get("returns"),
        )
        for key, call in row.get("calls", {}).items()
    }
    sites = {part: {key: _site(part, key, site) for key, site in rows.items()} for part, rows in row["sites"].items()}
    return Family(
        name=name,
        about=row["about"],
        matches=tuple(
            Match(
                class_name=match["class"],
                module=match["module"],
                model_type=match["model_type"],
                code=match.get("code"),
                inside=match.get("inside", ""),
                config=match.get("config"),
            )
            for match in matches
        ),
        trunk=row["trunk"],
        head=frozenset(row["head"]),
        layers=_many(row["layers"]),
        sizes={key: _many(size) for key, size in row["sizes"].items()},
        parts=parts,
        calls=calls,
        sites=sites,
        invariants=frozenset(row.get("invariants", ())),
        router=_router(row["router"]) if "router" in row else None,
    )


def _router(row: Mapping[str, Any]) -> Router:
    expressions = {key: _many(row[key]) for key in ("groups", "renormalise", "scaling")}
    return Router(part=row["part"], bias=row["bias"], **expressions)


def _site(part: str, name: str, row: Mapping[str, Any]) -> Site:
    fields = {key: value for key, value in row.items() if key not in ("from", "axes", "layout", "numbers", "fast")}
    axes, layout = (tuple(row[key]) if key in row else None for key in ("axes", "layout"))
    numbers = {key: _many(expression) for key, expression in row.get("numbers", {}).items()}
    fast = _site(part, name, row["fast"]) if "fast" in row else None
    return Site(
        name=name, part=part, inputs=row.get("from", {}), numbers=numbers, axes=axes, layout=layout, fast=fast, **fields
    )


def _many(item: Any) -> tuple[str, ...]:
    return tuple(item) if isinstance(item, list | tuple) else (str(item),)
