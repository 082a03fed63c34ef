"""PTX text: the entries it has, their parameters, and scalars that are loaded.

A kernel's by-value parameter is part of its launch, so a new value is a new launch.
`load_scalars` makes such a parameter the address of the value instead, wherever the
kernel loads it plainly. The kernel's code stays as it is, but for that load.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
# More scalars than these are loaded by a warp when a block begins, and kept in shared
# memory: where they are used they would wait for memory a few times.
MOST_APART = 32

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(\(|\{|\.)")
_PARAMETER = re.compile(
    r"""\.param \s+ (?:\.align\s+\d+\s+)? \. (?P<type>[bsuf]\d+) \s+
        (?P<pointer> \.ptr (?:\s*\.(?:const|global|local|shared))?
            (?:\s*\.align\s+\d+)? \s+ )?
        (?P<name>[\w$%]+) \s* (?: \[ \s* (?P<count>\d+) \s* \] )?""",
    re.VERBOSE,
)
_LOAD = (
    r"(?P<guard>@!?[%\w$]+\s+)?ld\.param(?:::entry)?\.(?P<type>[bsuf]\d+)\s+"
    r"(?P<to>[%\w$]+)\s*,\s*\[\s*{name}\s*(?:\+\s*0\s*)?\]\s*;"
)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: as PTX has it, "u64", "f32", …; "b8" where it is bytes.

    name: as the source has it, if that is known. size: in bytes. pointer: whether the
    PTX says that it is one; `None` where a 64-bit number may be one.
    """

    type: str
    size: int
    name: str | None = None
    pointer: bool | None = None

    @property
    def is_bytes(self) -> bool:
        """A struct, an array, or a 16-bit float, whose type PTX does not tell."""
        return self.type == "b8"

    def takes_pointer(self) -> bool:
        return self.size == 8 and self.pointer is not False and self.type[0] in "ub"


class Loaded(NamedTuple):
    """A scalar in memory.

    type: as PTX has it: "f32", "s32", "u32", "b16", … axis: "x", "y" or "z" where the
    blocks of a grid have a value each, one after the other.
    """

    type: str
    axis: str | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    name: str
    parameters: tuple[Parameter, ...]
    max_threads: int | None  # of a block, where .maxntid says it
    block: tuple[int, int, int] | None  # of every launch, where .reqntid says it
    symbols: tuple[str, ...]  # of the parameters
    start: int  # of its parameters, in the text without comments
    end: int


def version(text: str) -> str | None:
    """Of the PTX ISA: "9.0"."""
    found = re.search(r"^\s*\.version\s+(\d+\.\d+)", text, re.MULTILINE)
    return found[1] if found else None


def target(text: str) -> str | None:
    """What the PTX is for: "sm_90a"."""
    found = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    return found[1] if found else None


def entries(text: str) -> dict[str, Entry]:
    """The kernels of a PTX module, by name."""
    text = _blank_comments(text)
    found = {}
    for match in _ENTRY.finditer(text):
        name, after = match[1], match.start(2)
        begin = text.index("(", after) + 1 if match[2] == "(" else after
        close = _closing(text, begin) if match[2] == "(" else after
        brace = text.find("{", close)
        if brace < 0 or ";" in text[close:brace]:
            continue  # declared, not defined
        parameters, symbols = _parameters(text[begin:close])
        most = _sizes("maxntid", text[close:brace])
        threads = math.prod(most) if most else None
        block = _sizes("reqntid", text[close:brace])
        end = _closing(text, brace + 1, "{}")
        found[name] = Entry(name, parameters, threads, block, symbols, begin, end)
    return found


def load_scalars(
    text: str,
    entry: str,
    loaded: Mapping[int, Loaded],
    parameters: Sequence[Parameter] | None = None,
) -> str:
    """The module with some of an entry's scalar parameters given by their addresses.

    Up to `MOST_APART` of them take the scalars' places among the parameters. More are a
    table behind all other parameters, in the order of `order_of`.

    loaded: for the number of each such parameter what lies there. A 64-bit integer may
    lie there with 32 bits, a 64-bit float as a 32-bit one. parameters: the entry's,
    where they have names.

    Raises ValueError, with the parameter's name, where it is no scalar or where the
    kernel does anything else with it than load it whole.
    """
    blank = _blank_comments(text)
    found = entries(text)[entry]
    body = blank[found.start : found.end]
    edits: list[tuple[int, int, str]] = []
    groups = _groups(loaded)
    places = {
        number: _LANES * i + lane
        for i, group in enumerate(groups)
        for lane, number in enumerate(group)
    }
    if groups:
        begin = body.index("{", _closing(body, 0)) + 1
        edits.append((begin, begin, _load_together(groups, loaded)))
        edits += _with_table(body, found.symbols, places)
    for number, lies in loaded.items():
        symbol = found.symbols[number]
        parameter = (parameters or found.parameters)[number]
        shown = f"parameter {number} of kernel {entry!r}"
        if parameter.name:
            shown += f", {parameter.name!r},"
        if parameter.size > 8 or (parameter.is_bytes and parameter.size > 2):
            raise ValueError(f"{shown} is a struct of {parameter.size} bytes")
        declared = _declaration(symbol).search(body)
        assert declared is not None
        if not groups:
            edits.append((*declared.span(), f".param .u64 {symbol}"))
        loads = list(re.finditer(_LOAD.replace("{name}", re.escape(symbol)), body))
        uses = re.findall(rf"(?<![\w$%]){re.escape(symbol)}(?![\w$%])", body)
        if len(uses) != len(loads) + 1:
            raise ValueError(
                f"{shown} is used otherwise than by loading it: its address is taken, "
                "or parts of it are loaded"
            )
        for load in loads:
            if SIZES[load["type"][1:]] != parameter.size:
                raise ValueError(f"{shown} is loaded as {load['type']}")
            place = places.get(number)
            edits.append(
                (*load.span(), _load_through(load, symbol, lies, number, place))
            )
    pieces, at = [], 0
    for begin, end, new in sorted(edits):
        pieces += [text[found.start + at : found.start + begin], new]
        at = end
    rest = text[found.start + at :]
    return text[: found.start] + "".join(pieces) + rest


def order_of(loaded: Mapping[int, Loaded]) -> tuple[int, ...]:
    """The parameters whose addresses are one table, in its order. None: none are."""
    return tuple(number for group in _groups(loaded) for number in group)


def _load_through(
    load: re.Match[str], symbol: str, loaded: Loaded, number: int, place: int | None
) -> str:
    """The value from where the parameter points to, or from its place in `_SHARED`.

    One line, in a scope of its own.
    """
    guard, to, wanted = load["guard"] or "", load["to"], load["type"]
    lies, axis = loaded
    lines = []
    if place is None:
        at = f"%kvblock_at{number}"
        lines = [f".reg .b64 {at}", f"ld.param.u64 {at}, [{symbol}]"]
        lines.append(f"cvta.to.global.u64 {at}, {at}")
        lines += _own_of_block(axis, SIZES[lies[1:]], at, f"%kvblock_block{number}")
        source = f"ld.global.nc.{{}} {{}}, [{at}]"
    else:
        source = f"ld.shared.{{}} {{}}, [{_SHARED}+{8 * place}]"
    if lies[1:] == wanted[1:]:
        lines.append(guard + source.format(wanted, to))
    else:  # 64 bits wanted, 32 there
        part, kind = f"%kvblock_of{number}", "f64" if lies == "f32" else f"{lies[0]}64"
        lines.append(f".reg .b32 {part}")
        lines.append(source.format("b32", part))
        lines.append(f"{guard}cvt.{kind}.{lies} {to}, {part}")
    return "{ " + "; ".join(lines) + "; }"


def _own_of_block(axis: str | None, size: int, at: str, block: str) -> list[str]:
    if axis is None:
        return []
    return [
        f".reg .b32 {block}",
        f"mov.u32 {block}, %ctaid.{axis}",
        f"mad.wide.u32 {at}, {block}, {size}, {at}",
    ]


_TABLE, _SHARED, _LANES = "kvblock_addresses", "kvblock_scalars", 32


def _groups(loaded: Mapping[int, Loaded]) -> list[list[int]]:
    """Those that 32 lanes load at a time, alike in size and axis."""
    if len(loaded) <= MOST_APART:
        return []
    alike: dict[tuple[int, str], list[int]] = {}
    for number, (lies, axis) in loaded.items():
        alike.setdefault((SIZES[lies[1:]], axis or ""), []).append(number)
    return [
        numbers[first : first + _LANES]
        for _, numbers in sorted(alike.items())
        for first in range(0, len(numbers), _LANES)
    ]


def _with_table(
    body: str, symbols: Sequence[str], places: Mapping[int, int]
) -> list[tuple[int, int, str]]:
    """Edits: the table behind the parameters that stay."""
    table = f".param .align 8 .b8 {_TABLE}[{8 * len(places)}]"
    edits = []
    for number, symbol in enumerate(symbols):
        declared = _declaration(symbol).search(body)
        assert declared is not None
        begin, end = declared.span()
        if number + 1 == len(symbols):
            stays = number not in places
            edits.append((end if stays else begin, end, ", " * stays + table))
        elif number in places:
            edits.append((begin, body.index(",", end) + 1, ""))
    return edits


def _load_together(
    groups: Sequence[Sequence[int]], loaded: Mapping[int, Loaded]
) -> str:
    """All at once, by a block's first 32 threads: a lane for each of a group. One line.

    A block of fewer threads goes round: each is several lanes, one by one.
    """
    lane, threads, there, own, table = (
        f"%kvblock_{x}" for x in ("lane", "n", "p", "own", "table")
    )
    order = " ".join(f"{n}{loaded[n].axis or ''}" for group in groups for n in group)
    lines = [
        f"/* {_TABLE}: {order} */ "
        f".shared .align 8 .b8 {_SHARED}[{8 * _LANES * len(groups)}]",
        "{ .reg .b32 %kvblock_id<3>",
        f".reg .b32 {lane}, {threads}, {own}",
        f".reg .b64 {table}, %kvblock_from<{len(groups)}>",
        f".reg .pred {there}, %kvblock_p<{len(groups)}>",
        f"mov.u32 {lane}, %tid.z",
        f"mov.u32 {threads}, %ntid.z",
    ]
    for axis in "yx":
        lines += [
            f"mov.u32 %kvblock_id1, %tid.{axis}",
            f"mov.u32 %kvblock_id2, %ntid.{axis}",
            f"mad.lo.u32 {lane}, {lane}, %kvblock_id2, %kvblock_id1",
            f"mul.lo.u32 {threads}, {threads}, %kvblock_id2",
        ]
    lines += [
        f"kvblock_again: setp.ge.u32 {there}, {lane}, {_LANES}",
        f"@{there} bra kvblock_there",
        f"mov.u32 {own}, {_SHARED}",
        f"mad.lo.u32 {own}, {lane}, 8, {own}",
        f"mov.b64 {table}, {_TABLE}",
        f"mad.wide.u32 {table}, {lane}, 8, {table}",
    ]
    loads, stores, first = [], [], 0
    for i, group in enumerate(groups):
        lies, own_axis = loaded[group[0]]
        size = SIZES[lies[1:]]
        at, value, here = f"%kvblock_from{i}", f"%kvblock_value{i}", f"@%kvblock_p{i}"
        lines += [
            f"setp.lt.u32 %kvblock_p{i}, {lane}, {len(group)}",
            f"{here} ld.param.u64 {at}, [{table}+{8 * first}]",
        ]
        loads.append(f"cvta.to.global.u64 {at}, {at}")
        loads += _own_of_block(own_axis, size, at, f"%kvblock_block{i}")
        loads.append(f".reg .b{max(8 * size, 16)} {value}")
        loads.append(f"{here} ld.global.nc.b{8 * size} {value}, [{at}]")
        stores.append(f"{here} st.shared.b{8 * size} [{own}+{8 * _LANES * i}], {value}")
        first += len(group)
    lines += [
        *loads,
        *stores,
        f"add.u32 {lane}, {lane}, {threads}",
        "bra kvblock_again",
        "kvblock_there: bar.sync 0",
    ]
    return " " + "; ".join(lines) + "; }"


def _sizes(directive: str, text: str) -> tuple[int, int, int] | None:
    """What a directive says of x, y and z; those that it leaves out are 1."""
    found = re.search(rf"\.{directive}\s+(\d+(?:\s*,\s*\d+)*)", text)
    if found is None:
        return None
    x, y, z = (*map(int, found[1].split(",")), 1, 1)[:3]
    return x, y, z


def _declaration(symbol: str) -> re.Pattern[str]:
    return re.compile(
        rf"\.param\s[^,()]*?(?<![\w$%]){re.escape(symbol)}(?![\w$%])(\s*\[\s*\d+\s*\])?"
    )


def _parameters(text: str) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    parameters, symbols = [], []
    for match in _PARAMETER.finditer(text):
        size = SIZES[match["type"][1:]] * int(match["count"] or 1)
        kind = "b8" if match["count"] else match["type"]
        pointer = True if match["pointer"] else None
        if kind[0] in "fs" or size != 8:
            pointer = False
        parameters.append(Parameter(kind, size, None, pointer))
        symbols.append(match["name"])
    return tuple(parameters), tuple(symbols)


def _blank_comments(text: str) -> str:
    """Of the same length: every character stays at its place."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def _closing(text: str, begin: int, pair: str = "()") -> int:
    depth = 1
    for match in re.compile(f"[{re.escape(pair)}]").finditer(text, begin):
        depth += 1 if match[0] == pair[0] else -1
        if depth == 0:
            return match.start()
    raise ValueError("PTX ends within a kernel")
