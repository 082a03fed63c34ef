"""Two builds of libkvblock.so in turns: has a change made the kernels slower?

    python benchmarks/turns.py OLD NEW [--cases TEXT] [--bits] [--out FILE]

Calls the attention launchers by the C interface, without jax. In each of nine rounds
both libraries compute the same call for about 12 ms, and the order changes; a row is
the median of the rounds' ratios, old time / new time. --bits then says in which results
they differ. Needs torch on a Hopper GPU.
A library of before attention's struct was split by pass needs --old-flat, and
--old-without FIELD for each member that its struct lacks besides (base).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
from attention_launches import Attention, Call, fields, workspace_bytes

ROUNDS, TURN_MS = 9, 12
RATIO = "old / new"
FULL, CAUSAL = -1, 0  # window_right
# Name, batch, heads, KV heads, length, head dim, window_right, options.
CASES: tuple[tuple[str, int, int, int, int, int, int, dict[str, Any]], ...] = (
    ("full 8k D128", 2, 16, 16, 8192, 128, FULL, {}),
    ("causal 8k D128", 2, 16, 16, 8192, 128, CAUSAL, {}),
    ("causal 4k D128", 4, 16, 16, 4096, 128, CAUSAL, {}),
    ("causal 512 x32 D128", 32, 16, 16, 512, 128, CAUSAL, {}),
    ("causal 8k D64", 2, 32, 32, 8192, 64, CAUSAL, {}),
    ("causal 8k GQA", 2, 32, 8, 8192, 128, CAUSAL, {}),
    ("causal 8k D256", 2, 8, 8, 8192, 256, CAUSAL, {}),
    ("causal 4k D96", 2, 16, 16, 4096, 96, CAUSAL, {}),
    ("causal 4k 192/128", 2, 16, 16, 4096, 192, CAUSAL, {"value_dim": 128}),
    ("causal 8k D128 deterministic", 2, 16, 16, 8192, 128, CAUSAL, {"turns": True}),
    ("tiles 1/8 8k D128", 1, 16, 16, 8192, 128, FULL, {"tiles": 8}),
    ("tiles 1/8 8k D64", 1, 16, 16, 8192, 64, FULL, {"tiles": 8}),
    ("tiles 1/8 8k D256", 1, 8, 8, 8192, 256, FULL, {"tiles": 8}),
    ("tiles 1/8 16k GQA", 1, 32, 8, 16384, 128, FULL, {"tiles": 8}),
    ("tiles 1/8 causal 16k GQA", 1, 32, 8, 16384, 128, CAUSAL, {"tiles": 8}),
    ("dropout 8k D128", 2, 16, 16, 8192, 128, FULL, {"dropout": 13}),
    ("dropout causal 8k D128", 2, 16, 16, 8192, 128, CAUSAL, {"dropout": 13}),
    ("dropout causal 16k GQA", 1, 32, 8, 16384, 128, CAUSAL, {"dropout": 13}),
    ("dropout causal 8k D64", 2, 32, 32, 8192, 64, CAUSAL, {"dropout": 13}),
    ("dropout causal 8k D256", 2, 8, 8, 8192, 256, CAUSAL, {"dropout": 13}),
    ("bias 4k D128", 1, 16, 16, 4096, 128, FULL, {"bias": True}),
    ("bias 4k D64", 1, 16, 16, 4096, 64, FULL, {"bias": True}),
)


# What the flat struct did not have, and what it had behind the members of Call.
LATER = ("tile_map", "tile_masks", "num_tile_masks")
FLAT = "o lse base d_o delta dq_accum dq dk dv dbias dq_turns dq_state"


class Library:
    """A build, and the struct that it was compiled with.

    flat: one struct for all passes, without the members that it lacks.
    """

    def __init__(self, path: str, flat: bool = False, lacks: Any = ()) -> None:
        lacks = {*lacks, *LATER}
        had = [*Call._fields_, *fields(ctypes.c_void_p, FLAT)]
        made = {"_fields_": [field for field in had if field[0] not in lacks]}
        self.struct = type("Struct", (ctypes.Structure,), made) if flat else Attention
        self.flat, self.members = flat, {field[0] for field in self.struct._fields_}
        if not flat:
            self.members -= {"dq_accum"}  # of the generic kernels
        self.library = ctypes.CDLL(path)
        self.launchers = {}
        for name in ("forward", "backward_kv"):
            launcher = getattr(self.library, f"kvblock_attention_{name}")
            launcher.restype = ctypes.c_char_p
            launcher.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
            self.launchers[name] = launcher

    def workspace(self, call: Any, name: str) -> Any:
        """What a call works in, or None."""
        size = 0 if self.flat else workspace_bytes(self.library, call, name)
        return torch.empty(size, dtype=torch.uint8, device="cuda") if size else None

    def time(self, name: str, members: dict[str, Any], times: int) -> float:
        """Milliseconds of a call, by events around some of them."""
        call = self.struct(**{k: v for k, v in members.items() if k in self.members})
        if (workspace := self.workspace(call, name)) is not None:
            call.workspace = workspace.data_ptr()
        call = call if self.flat else call.of(name)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream().cuda_stream
        start.record()
        for _ in range(times):
            error = self.launchers[name](ctypes.byref(call), stream)
            assert error is None, error
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times


def draw(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, right: int, **how: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The struct's members of a call, and the tensors that they point to."""
    kept: dict[str, torch.Tensor] = {}
    value_dim = how.get("value_dim", dim)
    normal = lambda *shape: torch.randn(shape, device="cuda")  # noqa: E731
    shapes = {"q": (heads, dim), "k": (kv_heads, dim)}
    shapes |= {"v": (kv_heads, value_dim), "d_o": (heads, value_dim)}
    for name, (n, d) in shapes.items():
        kept[name] = normal(batch, length, n, d).bfloat16()
    kept["o"] = torch.empty_like(kept["d_o"])
    kept |= {f"d{name}": torch.empty_like(kept[name]) for name in "qkv"}
    rows = (batch, heads, length)
    kept |= {"lse": normal(*rows), "delta": normal(*rows) * 0.1}
    tiles = batch * heads * -(-length // 64)
    kept["dq_accum"] = normal(tiles * 64 * dim)
    kept["dq_state"] = torch.zeros(tiles * 2, dtype=torch.int32, device="cuda")
    if how.get("turns"):
        kept["dq_turns"] = torch.zeros(tiles, dtype=torch.int32, device="cuda")
    members: dict[str, Any] = {
        "deterministic": bool(how.get("turns")),
        "kernels": 1, "batch": batch, "num_heads": heads, "num_kv_heads": kv_heads,
        "q_len": length, "kv_len": length, "head_dim": dim, "value_dim": value_dim,
        "scale": dim**-0.5, "window_left": -1, "window_right": right,
    }  # fmt: skip
    if how.get("bias"):
        kept["bias"], kept["base"] = normal(1, heads, length, length), normal(*rows)
        members |= {"bias_dtype": 2, "bias_batch": 1, "bias_heads": heads}
    if parts := how.get("dropout"):
        keys = torch.randint(2**31, (batch, heads, 2), dtype=torch.int32)
        kept["dropout_keys"] = keys.cuda()
        members["dropout"] = parts
    if share := how.get("tiles"):
        lists = draw_lists(heads, length // 128, share, right == CAUSAL)
        kept |= {name: x.cuda() for name, x in lists.items()}
        members |= {"tile_batch": 1, "tile_heads": heads, "tile_q": 128, "tile_kv": 128}
        members["max_tiles"] = lists["tile_indices"].shape[-1]
        members["max_tiles_t"] = lists["tile_indices_t"].shape[-1]
    members |= {name: tensor.data_ptr() for name, tensor in kept.items()}
    return members, kept


def draw_lists(
    heads: int, tiles: int, share: int, causal: bool
) -> dict[str, torch.Tensor]:
    """Lists, both ways, of one in `share` of the tiles that a row sees, by chance.

    Where it is causal, a row's own tile is among them.
    """
    chances = torch.rand(heads, tiles, tiles)
    if causal:
        row, column = torch.meshgrid(*[torch.arange(tiles)] * 2, indexing="ij")
        chances += 2.0 * (row == column) - 2.0 * (row < column)
        seen = row[:, 0] + 1
    else:
        seen = torch.full((tiles,), tiles)
    ranks = chances.argsort(-1, descending=True).argsort(-1)
    listed = ranks < -(-seen[:, None] // share)
    found = {}
    for end, each in (("", listed), ("_t", listed.mT)):
        counts = each.sum(-1)
        at = torch.argsort((~each).to(torch.int8), dim=-1, stable=True)
        if not end:
            at = at[..., : int(counts.max())]
        found[f"tile_indices{end}"] = at.to(torch.int32).contiguous()
        found[f"tile_counts{end}"] = counts.to(torch.int32).contiguous()
    return found


def bits(
    libraries: tuple[Library, Library], name: str, members: Any, kept: Any
) -> list[str]:
    """The results of a call in which two libraries have other bits."""
    results = ("o", "lse") if name == "forward" else ("dq", "dk", "dv")
    found = []
    for library in libraries:
        # lse, a result of forward, is an operand of backward.
        before = {result: kept[result].clone() for result in results}
        for result in results:
            kept[result].fill_(float("nan"))
        library.time(name, members, 1)
        found.append({result: kept[result].clone() for result in results})
        for result in results:
            kept[result].copy_(before[result])
    words = [{r: x[r].contiguous().view(torch.uint8) for r in results} for x in found]
    return [r for r in results if not torch.equal(words[0][r], words[1][r])]


def compare(old: Library, new: Library, name: str, members: Any) -> dict[str, float]:
    """Milliseconds of both, and the rounds' ratio, by implementation."""
    old.time(name, members, 3)
    times = max(3, int(TURN_MS / max(new.time(name, members, 3), 0.01)))
    found: dict[Library, list[float]] = {old: [], new: []}
    for i in range(ROUNDS):
        for library in (old, new) if i % 2 else (new, old):
            found[library].append(library.time(name, members, times))
    ratios = [a / b for a, b in zip(found[old], found[new], strict=True)]
    middle = statistics.median
    return {"old": middle(found[old]), "new": middle(found[new]), RATIO: middle(ratios)}


def rows_of(case: str, found: dict[str, float]) -> list[dict[str, Any]]:
    """As in the other results: README.md says what a row is."""
    return [
        {
            "case": case,
            "implementation": who,
            "metric": "ratio" if who == RATIO else "time",
            "value": round(value, 4),
            "unit": "" if who == RATIO else "ms",
        }
        for who, value in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--old-flat", action="store_true")
    parser.add_argument("--old-without", action="append", default=[], metavar="FIELD")
    parser.add_argument("--cases", default="", help="a part of their names")
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    old = Library(options.old, options.old_flat, options.old_without)
    new = Library(options.new)
    warm = torch.randn(8192, 8192, device="cuda").bfloat16()
    for _ in range(60):
        warm @ warm
    rows = []
    for name, *sizes, how in CASES:
        if options.cases not in name:
            continue
        members, kept = draw(*sizes, **how)
        for launcher in ("forward", "backward_kv"):
            found = compare(old, new, launcher, members)
            rows += rows_of(f"{name} / {launcher}", found)
            columns = [f"{name} / {launcher}", *(f"{x:.4f}" for x in found.values())]
            if options.bits:
                other = bits((old, new), launcher, members, kept)
                columns.append(f"other bits: {', '.join(other) or 'none'}")
            print(*columns, sep="\t", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
