"""The kernels of paged attention on a GPU, beside FlashInfer's, without jax.

    python benchmarks/paged_kernels.py LIBRARY [--commit C] [--out FOLDER] [--only RE]

Each call is recorded into a CUDA graph many times over and replayed, everybody in
turns of random order, so that neither launches from a host nor the clock tells them
apart. Rows of decoding are TB/s of the keys and values that are read; rows of prefill,
and of latent caches beside that, TFLOP/s of the products under the causal mask.
FlashInfer plans on the host, ahead of its kernel: its kernel alone is timed, and its
plan apart ("plan", ms of the host). Pages are drawn at random from all of the cache.
Every result is held to plain PyTorch first. Needs torch; what FlashInfer is not
installed for, or fails at, is said. Of chunks behind a prefix both other ways are timed
beside ours: "by queries", a CTA for each tile of them, which is what a split_size
makes, and "by keys", the kernel for few queries, to which a mask brings them.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import dataclasses
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from attention_launches import Attention, workspace_bytes
from paged_problems import NUMBERS, Paged

ROUNDS, LAUNCHES = 15, 10
SECONDS = 4e-3  # of a turn, about


@dataclasses.dataclass(frozen=True)
class Case:
    """queries: of each sequence; keys: theirs, the new ones among them."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 16
    layout: str = "NHD"
    dense: bool = False  # beside our kernel over dense arrays
    scales: str = ""  # of a cache of e4m3: "all" or "tokens"
    latent: int = 0  # values are so many of the first columns of the keys
    tree: bool = False  # a word of bits for each query
    split: int = 0  # keys after which sequences are cut
    both: bool = False  # also by queries alone, and by the kernel for few queries

    @property
    def bytes_read(self) -> int:
        """Keys and values, once."""
        size = 1 if self.scales else 2
        each = 1 if self.latent else 2
        return each * size * sum(self.keys) * self.kv_heads * self.dim

    @property
    def prefills(self) -> bool:
        return sum(self.queries) > 40 * len(self.queries)


def decode(batch: int, keys: int, **options: Any) -> Case:
    heads = f"H{options.get('heads', 32)}/{options.get('kv_heads', 8)}"
    queries = options.pop("queries", 1)
    name = f"B{batch} {heads} S{keys} page {options.get('page', 16)}"
    name += f" {options.get('layout', 'NHD')}"
    if queries > 1:
        name += f" {queries} queries"
        options["tree"] = True
    if split := options.get("split"):
        name += f" split {split}"
    if scales := options.get("scales"):
        name += f" e4m3, {scales}"
    return Case(name, (queries,) * batch, (keys,) * batch, **options)


def log_uniform() -> Case:
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(128), np.log(32768), 64))
    keys = tuple(int(n) for n in lengths)
    return Case("B64 S128...32768 page 16 NHD", (1,) * 64, keys)


def chunk(queries: int, keys: int, beside: int = 0, **options: Any) -> Case:
    """Of a prompt, behind keys that are there; beside sequences that decode."""
    shape = f"H{options.get('heads', 32)}/{options.get('kv_heads', 8)}"
    name = f"{queries} on {keys} {shape} D{options.get('dim', 128)}"
    if beside:
        name = f"{beside} x 256 + {name}"
    lengths = (256,) * beside + (keys + queries,)
    return Case(name, (1,) * beside + (queries,), lengths, both=True, **options)


CASES = (
    *(decode(64, 8192, page=page, dense=page == 16) for page in (16, 32, 64, 128)),
    *(decode(64, 8192, page=page, layout="HND") for page in (16, 64)),
    decode(64, 8192, page=1),
    decode(8, 32768, page=64, dense=True),
    decode(1, 131072, dense=True),
    decode(128, 4096, heads=16, kv_heads=1, page=64, dense=True),
    log_uniform(),
    decode(256, 512, dense=True),
    decode(16, 1024, dense=True),
    decode(64, 8192, queries=4),
    decode(64, 8192, queries=8),
    decode(64, 8192, split=2048),
    decode(1, 131072, split=2048),
    *(
        Case(
            f"latent B64 H{heads} S8192 page 64",
            (1,) * 64,
            (8192,) * 64,
            heads=heads,
            kv_heads=1,
            dim=576,
            latent=512,
            page=64,
        )
        for heads in (16, 128)
    ),
    decode(64, 8192, scales="all"),
    decode(64, 8192, scales="tokens"),
    *(
        Case(f"8 x 4096 on 4096 page {page}", (4096,) * 8, (8192,) * 8, page=page)
        for page in (1, 16, 64)
    ),
    Case("60 x 4096 + 2048 new page 16", (1,) * 60 + (2048,), (4096,) * 60 + (2048,)),
    *(
        chunk(*sizes)
        for sizes in (
            (32, 32768),
            (128, 1024),
            (128, 4096),
            (128, 32768),
            (256, 8192),
            (512, 8192),
            (512, 65536),
        )
    ),
    *(chunk(n, 32768, heads=9, kv_heads=3, dim=64) for n in (64, 129, 512)),
    chunk(128, 32768, beside=60),
    chunk(129, 32768, beside=63, heads=9, kv_heads=3, dim=64),
)


class Problem:
    """The arrays of a case on the GPU."""

    def __init__(self, case: Case) -> None:
        self.case = c = case
        torch.manual_seed(0)
        pages = [-(-n // c.page) for n in c.keys]
        self.pages = sum(pages)
        order = torch.randperm(self.pages, device="cuda", dtype=torch.int32)
        width = max(pages)
        self.tables = torch.full((len(pages), width), -1, dtype=torch.int32).cuda()
        self.first = np.cumsum([0, *pages])
        for b, n in enumerate(pages):
            self.tables[b, :n] = order[self.first[b] : self.first[b + 1]]
        self.indices = torch.cat([row[:n] for row, n in zip(self.tables, pages)])  # noqa: B905
        shape = (c.page, c.kv_heads) if c.layout == "NHD" else (c.kv_heads, c.page)
        size = (self.pages, 1 if c.latent else 2, *shape, c.dim)
        self.cache = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_()
        if c.scales:
            self.cache = (self.cache * 16).to(torch.float8_e4m3fn)
            scales = (2, self.pages, c.page, c.kv_heads)
            self.scales = torch.rand(scales, device="cuda") / 16 + 1 / 32
            if c.scales == "all":
                self.scales = torch.full((2, 1), 1 / 16, device="cuda")
        self.starts = torch.tensor(np.cumsum([0, *c.queries]), dtype=torch.int32).cuda()
        self.kv_lens = torch.tensor(c.keys, dtype=torch.int32).cuda()
        rows = sum(c.queries)
        self.q = torch.randn(rows, c.heads, c.dim, device="cuda").bfloat16()
        self.bits = torch.full((rows, 1), -1, dtype=torch.int32, device="cuda")

    def truth(self, b: int) -> Any:
        """The result of sequence b in float32, at most its last 64 rows."""
        c = self.case
        n = -(-c.keys[b] // c.page)
        ids = self.tables[b, :n].long()
        cache = self.cache[ids].float()
        if c.scales == "all":
            cache = cache / 16
        elif c.scales:
            cache = cache * self.scales[:, ids].transpose(0, 1)[..., None]
        if c.layout == "HND":
            cache = cache.transpose(2, 3)
        k, v = (
            cache[:, i].reshape(-1, c.kv_heads, c.dim)[: c.keys[b]].float()
            for i in (0, cache.shape[1] - 1)
        )
        v = v[..., : c.latent or c.dim]
        first, end = int(self.starts[b]), int(self.starts[b + 1])
        q = self.q[max(first, end - 64) : end].float()
        group = c.heads // c.kv_heads
        q = q.reshape(len(q), c.kv_heads, group, c.dim)
        s = torch.einsum("tkgd,skd->kgts", q, k) * c.dim**-0.5
        at = torch.arange(len(k), device="cuda")
        own = torch.arange(len(k) - len(q), len(k), device="cuda")
        s = s.masked_fill(at[None] > own[:, None], -torch.inf)
        out = torch.einsum("kgts,skd->tkgd", s.softmax(-1), v)
        return out.reshape(len(q), c.heads, -1)

    def check(self, out: Any) -> None:
        for b in {0, len(self.case.keys) // 2, len(self.case.keys) - 1}:
            want = self.truth(b)
            end = int(self.starts[b + 1])
            off = (out[end - len(want) : end].float() - want).abs().max()
            assert off < 0.02 * want.abs().max() + 1e-3, f"sequence {b}: off by {off}"


def stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def ours(library: ctypes.CDLL, x: Problem) -> Callable[[], Any]:
    c, cache, size = x.case, x.cache, x.cache.element_size()
    axes = (2, 3) if c.layout == "NHD" else (3, 2)
    a = Paged(calls=1, sequences=len(c.keys), rows=len(x.q))
    a.num_heads, a.num_kv_heads = c.heads, c.kv_heads
    a.head_dim, a.value_dim = c.dim, c.latent or c.dim
    a.values_in_keys, a.split_size = c.latent > 0, c.split
    if c.tree:
        a.tree_mask, a.tree_words = x.bits.data_ptr(), 1
    a.scale, a.window_left, a.window_right = c.dim**-0.5, -1, 0
    a.q, a.query_start, a.kv_lens = (y.data_ptr() for y in (x.q, x.starts, x.kv_lens))
    a.block_tables = x.tables.data_ptr()
    a.table_width, a.block_size = x.tables.shape[1], c.page
    k = (ctypes.c_void_p * 1)(cache.data_ptr())
    v = (ctypes.c_void_p * 1)(cache.data_ptr() + cache.stride(1) * size)
    a.k, a.v = ctypes.addressof(k), ctypes.addressof(v)
    a.num_arrays, a.num_layers, a.num_blocks = 1, 1, x.pages
    for strides in (a.k_strides, a.v_strides):
        strides.block = cache.stride(0) * size
        strides.token, strides.head = (cache.stride(axis) * size for axis in axes)
    if c.scales:
        a.cache_dtype = NUMBERS["e4m3"]
        for to, scales in zip((a.k_scale, a.v_scale), x.scales, strict=True):
            to.data, to.each = scales.data_ptr(), c.scales == "tokens"
            if to.each:
                to.block, to.token, to.head = scales.stride()
    sized = library.kvblock_paged_attention_workspace
    sized.restype = ctypes.c_int64
    room = sized(ctypes.byref(a))
    workspace = torch.empty(room, dtype=torch.uint8, device="cuda").random_(0, 255)
    out = torch.full_like(x.q[..., : a.value_dim], float("nan"))
    a.o, a.workspace = out.data_ptr(), workspace.data_ptr()
    launch = library.kvblock_paged_attention_forward
    launch.restype = ctypes.c_char_p

    def run(held: Any = (k, v, workspace)) -> Any:
        error = launch(ctypes.byref(a), stream())
        assert error is None, error
        return out

    return run


def both(library: ctypes.CDLL, x: Problem) -> dict[str, Callable[[], Any]]:
    """Other ways to compute a chunk behind a prefix."""
    ways = {"queries": {"split": 1 << 30}, "keys": {"tree": True}}

    def alone(**options: Any) -> Callable[[], Any]:
        other = copy.copy(x)
        other.case = dataclasses.replace(x.case, **options)
        return ours(library, other)

    return {f"jax_kvblock, by {what}": alone(**way) for what, way in ways.items()}


def dense(library: ctypes.CDLL, x: Problem) -> Callable[[], Any]:
    """Our kernel over as many keys in dense arrays."""
    c = x.case
    shape = (len(c.keys), c.keys[0], c.kv_heads, c.dim)
    k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(x.q)
    a = Attention(kernels=0, batch=len(c.keys), num_heads=c.heads, q_len=c.queries[0])
    a.num_kv_heads, a.kv_len, a.scale = c.kv_heads, c.keys[0], c.dim**-0.5
    a.head_dim = a.value_dim = c.dim
    a.window_left = a.window_right = -1
    a.q, a.k, a.v, a.o = (y.data_ptr() for y in (x.q, k, v, out))
    room = workspace_bytes(library, a, "forward")
    workspace = torch.empty(room, dtype=torch.uint8, device="cuda")
    a.workspace = workspace.data_ptr()
    launch = library.kvblock_attention_forward
    launch.restype = ctypes.c_char_p

    def run(held: Any = (k, v, workspace)) -> Any:
        error = launch(ctypes.byref(a.of("forward")), stream())
        assert error is None, error
        return out

    return run


def copying(total: int) -> Callable[[], Any]:
    """Reads half of so many bytes and writes as many."""
    x = torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    y = torch.zeros_like(x)
    return lambda: x.copy_(y)


def flashinfer_paths(x: Problem, plans: dict[str, float]) -> dict[str, Any]:
    """Its wrappers after their plan, by name; what each plan took goes to `plans`."""
    import flashinfer

    c = x.case
    room = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    starts = torch.tensor(x.first, dtype=torch.int32)
    last = torch.tensor([(n - 1) % c.page + 1 for n in c.keys], dtype=torch.int32)
    kv_lens = torch.tensor(c.keys, dtype=torch.int32)
    q_starts = torch.tensor(np.cumsum([0, *c.queries]), dtype=torch.int32)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": x.cache.dtype}
    scales = {"k_scale": 1 / 16, "v_scale": 1 / 16} if c.scales else {}
    heads = (c.heads, c.kv_heads, c.dim)
    paths: dict[str, Any] = {}

    def plan(name: str, make: Callable[[], Any], *given: Any, **options: Any) -> Any:
        wrapper = make()
        wrapper.plan(*given, **options)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        wrapper.plan(*given, **options)
        torch.cuda.synchronize()
        plans[name] = time.perf_counter() - begin
        return wrapper

    def attempt(name: str, make: Callable[[], Callable[[], Any]]) -> None:
        try:
            paths[name] = make()
        except Exception as error:
            print(f"{c.name}: {name} DID NOT RUN: {error!r}"[:300], flush=True)

    def decoding() -> Callable[[], Any]:
        name = "flashinfer, decode"
        make = lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(  # noqa: E731
            room, c.layout, use_tensor_cores=c.heads > c.kv_heads
        )
        w = plan(name, make, starts, x.indices, last, *heads, c.page, **types)
        return lambda: w.run(x.q, x.cache, **scales)

    def prefilling() -> Callable[[], Any]:
        name = "flashinfer, prefill"
        make = lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, c.layout)  # noqa: E731
        given = (q_starts, starts, x.indices, last, *heads, c.page)
        w = plan(name, make, *given, causal=True, **types)
        return lambda: w.run(x.q, x.cache, **scales)

    def persistent() -> Callable[[], Any]:
        name = "flashinfer, persistent"
        make = lambda: flashinfer.BatchAttention(kv_layout=c.layout)  # noqa: E731
        given = (q_starts.cuda(), starts.cuda(), x.indices, kv_lens.cuda())
        more = (c.heads, c.kv_heads, c.dim, c.dim, c.page)
        w = plan(name, make, *given, *more, causal=True, **types)
        return lambda: w.run(x.q, x.cache, **scales)[0]

    if max(c.queries) == 1:
        attempt("flashinfer, decode", decoding)
    if max(c.queries) > 1:
        attempt("flashinfer, prefill", prefilling)
    attempt("flashinfer, persistent", persistent)
    return paths


def seconds_of(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Of one launch each, the median of rounds in which all take turns."""
    graphs = {}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                run()
        graphs[name] = graph

    def turn(graph: Any, replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / replays / LAUNCHES / 1e3

    replays = {
        n: max(1, int(SECONDS / LAUNCHES / turn(g, 1))) for n, g in graphs.items()
    }
    found: dict[str, list[float]] = {name: [] for name in graphs}
    # Who comes after whom counts, by the heat that it leaves.
    order = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for name in order.permutation(list(graphs)).tolist():
            found[name].append(turn(graphs[name], replays[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def bench(
    libraries: dict[str, ctypes.CDLL], case: Case, peers: bool
) -> list[dict[str, Any]]:
    """libraries: ours first, then other builds of it, by name."""
    x, plans = Problem(case), dict[str, float]()
    runs = {name: ours(library, x) for name, library in libraries.items()}
    if case.both:
        runs |= both(libraries["jax_kvblock"], x)
    if peers and case.scales != "tokens" and not case.latent:
        runs |= flashinfer_paths(x, plans)
    for name, run in list(runs.items()):
        try:
            x.check(run())
        except Exception as error:
            print(f"{case.name}: {name} IS WRONG OR FAILS: {error!r}"[:300], flush=True)
            del runs[name]
    if case.dense:
        runs["jax_kvblock, dense"] = dense(libraries["jax_kvblock"], x)
    if case.latent:
        runs["copy, as many bytes"] = copying(case.bytes_read)
    rows = []
    for name, seconds in seconds_of(runs).items():
        if case.prefills:
            pairs = sum(
                q * n - q * (q - 1) // 2
                for q, n in zip(case.queries, case.keys, strict=True)
            )
            rate, unit = 4 * pairs * case.heads * case.dim / seconds / 1e12, "TFLOP/s"
        else:
            rate, unit = case.bytes_read / seconds / 1e12, "TB/s"
        if case.latent and not name.startswith("copy"):
            products = 2 * sum(case.keys) * case.heads * (case.dim + case.latent)
            rows.append(
                row(case, name, "products", products / seconds / 1e12, "TFLOP/s")
            )
        rows.append(row(case, name, "rate", rate, unit))
        rows.append(row(case, name, "time", seconds * 1e6, "us", show=True, rate=rate))
    rows += [row(case, n, "plan", t * 1e3, "ms") for n, t in plans.items()]
    return rows


def row(
    case: Case, name: str, metric: str, value: float, unit: str, **shown: Any
) -> dict[str, Any]:
    if shown:
        print(
            f"{case.name:38} {name:24} {value:9.1f} us {shown['rate']:8.3f}", flush=True
        )
    return {
        "case": case.name,
        "implementation": name,
        "metric": metric,
        "value": float(f"{value:.6g}"),
        "unit": unit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--beside", nargs="*", type=Path, default=[], help="other builds of the library"
    )
    options = parser.parse_args()
    libraries = {"jax_kvblock": ctypes.CDLL(options.library)}
    libraries |= {path.stem: ctypes.CDLL(str(path)) for path in options.beside}
    rows = []
    warm = torch.randn(8192, 8192, device="cuda").bfloat16()
    for case in CASES:
        if re.search(options.only, case.name):
            for _ in range(20):  # a hot chip
                warm @ warm
            rows += bench(libraries, case, not options.no_peers)
            gc.collect()
            torch.cuda.empty_cache()
    if options.out:
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
        if "flashinfer" in sys.modules:
            versions["flashinfer"] = sys.modules["flashinfer"].__version__
        day = time.strftime("%Y-%m-%d")
        head = {
            "device": torch.cuda.get_device_name(),
            "date": day,
            "commit": options.commit,
            "versions": versions,
        }
        options.out.mkdir(parents=True, exist_ok=True)
        lines = ",\n  ".join(map(json.dumps, rows))
        text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'
        (options.out / f"paged-kernels-{day}.json").write_text(text)


if __name__ == "__main__":
    main()
