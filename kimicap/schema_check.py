"""Every problem of a schema tree at once, each with its path in the file (``values.mlp.router_logits.layout.1``)."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from kimicap import expressions

DTYPES = ("computed", "float32", "index", "int32", "bool")
READS = ("input", "output", "call", "compute", "module", "batch")
COMPUTED = (
    "next_token_probs",
    "final_state",
    "states",
    "chunk_states",
    "attention_scores",
    "attention_probabilities",
    "expert_outputs",
    "sigmoid",
    "turned",
    "log_decays",
    "situ",
    "router_logits",
    "slot_outputs",
    "mix_sources",
    "mix_weights",
)
KEEPS = ("first", "last")
INVARIANTS = (
    "embeddings_enter",
    "mixer_adds",
    "mlp_adds",
    "blocks_chain",
    "mlp_reads_norm",
    "slots_add",
    "latent_slots_add",
    "experts_add",
)
RAW_AXES = ("batch", "token", "past", "kept")

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TOP = {"dimensions": dict, "short_names": dict, "values": dict, "families": dict}
_VALUE = {"layout": list, "dtype": str, "about": str}
_MATCH = {"class": str, "module": str, "model_type": str}
_MATCH_MORE = {"code": str, "inside": str, "config": str}
_FAMILY = {
    "about": str,
    "match": (dict, list),
    "trunk": str,
    "head": list,
    "layers": (str, list),
    "sizes": dict,
    "parts": dict,
    "sites": dict,
}
_ROUTER = {
    "part": str,
    "bias": str,
    "groups": (str, list),
    "renormalise": (str, list),
    "scaling": (str, list),
}
_PART = {"host": str, "module": str, "class": str}
_SITE = {
    "input": str,
    "output": str,
    "call": str,
    "compute": str,
    "module": str,
    "batch": str,
    "argument": (str, int),
    "item": (str, int),
    "result": int,
    "from": dict,
    "numbers": dict,
    "axes": list,
    "layout": list,
    "about": str,
    "cut": str,
    "absent": bool,
    "whole": bool,
    "keep": str,
    "overwritten": bool,
    "fast": dict,
}
_CALL = {
    "functions": list,
    "method": str,
    "where": dict,
    "attention": bool,
    "ask": dict,
    "fast": dict,
    "returns": int,
}


def problems_of(tree: Mapping[str, Any]) -> list[str]:
    """Every problem of the whole tree, one sentence each; an empty list when there is none."""
    problems = list(_keys("", tree, required=_TOP))
    if problems:
        return problems
    dimensions = tree["dimensions"]
    hosts = tree["values"]
    for name, about in dimensions.items():
        if not isinstance(about, str):
            problems.append(f"dimensions.{name}: expected text, found {_kind(about)}")
    for host, rows in hosts.items():
        if not isinstance(rows, dict):
            problems.append(f"values.{host}: expected a table of values, found {_kind(rows)}")
            continue
        for name, row in rows.items():
            problems += _value(f"values.{host}.{name}", row, dimensions)
    own_names = {name for rows in hosts.values() for name in _table(rows)}
    for short, name in tree["short_names"].items():
        if short in own_names:
            problems.append(f"short_names.{short}: is a value's own name; choose another")
        host, _, value = str(name).partition(".")
        if value not in _table(hosts.get(host)):
            problems.append(f"short_names.{short}: no value is called {name!r}{_nearest(name, _all_names(hosts))}")
    for name, family in tree["families"].items():
        problems += _family(f"families.{name}", family, tree)
    return problems


def _value(path: str, row: Any, dimensions: Mapping[str, Any]) -> Iterator[str]:
    yield from _keys(path, row, required=_VALUE)
    row = _table(row)
    name = path.rpartition(".")[2]
    if not _NAME.fullmatch(name):
        yield f"{path}: {name!r} is no name for an array; write small letters, digits and underscores"
    if isinstance(row.get("about"), str) and not row["about"].strip():
        yield f"{path}.about: is empty; say what the value is"
    layout = row.get("layout")
    for number, name in enumerate(layout if isinstance(layout, list) else []):
        if name not in dimensions:
            yield f"{path}.layout.{number}: no dimension is called {name!r}{_nearest(name, dimensions)}"
    if isinstance(layout, list) and len(set(map(str, layout))) < len(layout):
        yield f"{path}.layout: names a dimension twice"
    if isinstance(row.get("dtype"), str) and row["dtype"] not in DTYPES:
        yield f"{path}.dtype: expected one of {', '.join(DTYPES)}, found {row['dtype']!r}"


def _family(path: str, row: Any, tree: Mapping[str, Any]) -> Iterator[str]:
    found = list(_keys(path, row, required=_FAMILY, optional={"calls": dict, "invariants": list, "router": dict}))
    if found:
        yield from found
        return
    several = isinstance(row["match"], list)
    for number, match in enumerate(row["match"] if several else [row["match"]]):
        where = f"{path}.match.{number}" if several else f"{path}.match"
        yield from _keys(where, match, required=_MATCH, optional=_MATCH_MORE)
    for key, size in {"layers": row["layers"], **{f"sizes.{k}": v for k, v in row["sizes"].items()}}.items():
        yield from _expressions(f"{path}.{key}", size)
    for key in row["sizes"]:
        host, _, dim = key.rpartition(".")
        if dim not in tree["dimensions"] or (host and host not in tree["values"]):
            known = [*tree["dimensions"], *(f"{host}.{dim}" for host in tree["values"] for dim in tree["dimensions"])]
            yield f"{path}.sizes.{key}: is no dimension, nor HOST.DIMENSION{_nearest(key, known)}"
    for number, name in enumerate(row["head"]):
        if name not in _table(tree["values"].get("model")):
            yield f"{path}.head.{number}: host 'model' has no value {name!r}{_nearest(name, tree['values']['model'])}"
    for name, part in row["parts"].items():
        yield from _part(f"{path}.parts.{name}", part, tree["values"])
    for name, call in row.get("calls", {}).items():
        yield from _call(f"{path}.calls.{name}", call, row["parts"])
    for number, name in enumerate(row.get("invariants", ())):
        if name not in INVARIANTS:
            yield f"{path}.invariants.{number}: no invariant is called {name!r}{_nearest(name, INVARIANTS)}"
    if "router" in row:
        yield from _router(f"{path}.router", row["router"], row["parts"])
    for part, sites in row["sites"].items():
        if part not in row["parts"]:
            yield f"{path}.sites.{part}: no part is called {part!r}{_nearest(part, row['parts'])}"
            continue
        if not isinstance(sites, dict):
            yield f"{path}.sites.{part}: expected a table, found {_kind(sites)}"
        host = _table(row["parts"][part]).get("host")
        for name, site in _table(sites).items():
            yield from _site(f"{path}.sites.{part}.{name}", name, site, row, sites, tree, host)


def _part(path: str, part: Any, hosts: Mapping[str, Any]) -> Iterator[str]:
    yield from _keys(path, part, required=_PART, optional={"blocks": (str, list)})
    part = _table(part)
    if isinstance(part.get("host"), str) and part["host"] not in hosts:
        yield f"{path}.host: no host is called {part['host']!r}{_nearest(part['host'], hosts)}"
    in_blocks = "{layer}" in str(part.get("module"))
    if in_blocks and "blocks" not in part:
        yield f"{path}.blocks: missing; a part with {{layer}} in its module must say in which blocks it is"
    if "blocks" in part:
        yield from _expressions(f"{path}.blocks", part["blocks"])


def _router(path: str, router: Mapping[str, Any], parts: Mapping[str, Any]) -> Iterator[str]:
    found = list(_keys(path, router, required=_ROUTER))
    if found:
        yield from found
        return
    if router["part"] not in parts:
        yield f"{path}.part: no part is called {router['part']!r}{_nearest(router['part'], parts)}"
    for key in ("groups", "renormalise", "scaling"):
        yield from _expressions(f"{path}.{key}", router[key])


def _call(path: str, call: Any, parts: Mapping[str, Any]) -> Iterator[str]:
    yield from _keys(path, call, required={"part": str}, optional=_CALL)
    call = _table(call)
    if "part" in call and call["part"] not in parts:
        yield f"{path}.part: no part is called {call['part']!r}{_nearest(call['part'], parts)}"
    if sum(bool(call.get(key)) for key in ("functions", "method", "attention")) != 1:
        yield f"{path}: needs one of `functions`, `method` and `attention: true`"
    functions = call.get("functions", ())
    for name, asked in _table(call.get("fast")).items():
        if name not in functions:
            yield f"{path}.fast.{name}: the call has no function {name!r}{_nearest(name, functions)}"
        elif not isinstance(asked, dict):
            yield f"{path}.fast.{name}: expected a table of arguments, found {_kind(asked)}"


def _site(
    path: str,
    name: str,
    site: Any,
    family: Mapping[str, Any],
    siblings: Any,
    tree: Mapping[str, Any],
    host: Any,
) -> Iterator[str]:
    found = list(_keys(path, site, optional=_SITE))
    if found:
        yield from found
        return
    if not name.startswith("_") and name not in _table(tree["values"].get(host)):
        values = _table(tree["values"].get(host))
        yield f"{path}: host {host!r} has no value of this name{_nearest(name, values)}"
    if site.get("keep", "last") not in KEEPS:
        yield f"{path}.keep: expected {' or '.join(KEEPS)}, found {site['keep']!r}"
    if "fast" in site:
        yield from _site(f"{path}.fast", name, site["fast"], family, siblings, tree, host)
    reads = [key for key in READS if key in site]
    if len(reads) != 1:
        yield f"{path}: needs exactly one of {', '.join(READS)}, found {', '.join(reads) or 'none'}"
        return
    if reads[0] == "compute":
        if site["compute"] not in COMPUTED:
            yield f"{path}.compute: no function is called {site['compute']!r}{_nearest(site['compute'], COMPUTED)}"
        for key, expression in _table(site.get("numbers")).items():
            yield from _expressions(f"{path}.numbers.{key}", expression)
        for key, source in _table(site.get("from")).items():
            if source not in siblings:
                yield f"{path}.from.{key}: this part has no site {source!r}{_nearest(source, siblings)}"
    if reads[0] == "call" and site["call"] not in family.get("calls", {}):
        yield f"{path}.call: no call is named {site['call']!r}{_nearest(site['call'], family.get('calls', {}))}"
    if reads[0] == "call" and [key in site for key in ("argument", "result", "whole")].count(True) != 1:
        yield f"{path}: a call site needs one of `argument`, `result` and `whole: true`"
    if reads[0] == "input" and "argument" not in site:
        yield f"{path}.argument: missing; which argument of the module is meant is always written"
    if not name.startswith("_") and reads[0] not in ("batch", "compute") and "axes" not in site:
        yield f"{path}.axes: missing; the axes as they are at the site are always written"
    for number, axis in enumerate(site.get("layout", [])):
        if axis not in tree["dimensions"]:
            yield f"{path}.layout.{number}: no dimension is called {axis!r}{_nearest(axis, tree['dimensions'])}"
    for number, axis in enumerate(site.get("axes", [])):
        for factor in str(axis).split("*"):
            if factor not in tree["dimensions"] and factor not in RAW_AXES:
                names = [*tree["dimensions"], *RAW_AXES]
                yield f"{path}.axes.{number}: no dimension is called {factor!r}{_nearest(factor, names)}"


def _expressions(path: str, item: Any) -> Iterator[str]:
    many = item if isinstance(item, list) else [item]
    for number, expression in enumerate(many):
        where = f"{path}.{number}" if isinstance(item, list) else path
        problem = expressions.check(expression) if isinstance(expression, str) else "must be written as text"
        if problem:
            yield f"{where}: {problem}"


def _keys(
    path: str,
    row: Any,
    *,
    required: Mapping[str, Any] | None = None,
    optional: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Problems of a table's keys and their types."""
    required, known = required or {}, {**(required or {}), **(optional or {})}
    prefix = f"{path}." if path else ""
    if not isinstance(row, dict):
        yield f"{path}: expected a table, found {_kind(row)}"
        return
    for key in required:
        if key not in row:
            yield f"{prefix}{key}: missing"
    for key, value in row.items():
        if key not in known:
            yield f"{prefix}{key}: unknown key{_nearest(str(key), known)}"
            continue
        kinds = known[key] if isinstance(known[key], tuple) else (known[key],)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(_NAMES[kind] for kind in kinds)
            yield f"{prefix}{key}: expected {expected}, found {_kind(value)}"


_NAMES = {dict: "a table", list: "a list", str: "text", int: "a whole number", bool: "true or false"}


def _kind(item: Any) -> str:
    return "nothing" if item is None else _NAMES.get(type(item), type(item).__name__)


def _table(item: Any) -> dict[str, Any]:
    return item if isinstance(item, dict) else {}


def _all_names(hosts: Mapping[str, Any]) -> list[str]:
    return [f"{host}.{name}" for host, rows in hosts.items() for name in _table(rows)]


def _nearest(name: Any, names: Any) -> str:
    close = get_close_matches(str(name), [str(item) for item in names], n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
