"""Attention to listed tiles as others have it: FlexAttention and FlashInfer, in torch.

They are given the very lists: FlexAttention as a BlockMask whose partial blocks are
the queries' own tiles (under a causal mask) and whose others are full; FlashInfer as
rows of a block-sparse matrix that all heads share, or as a map for each KV head. Its
causal mask counts the keys that a row lists, the last of which are the row's own: the
same mask, since lists are in order.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jax_kvblock import AttentionTiles
from support import attention_peers, common

BACKENDS = ("fa2", "fa3")
WORKSPACE = 512 << 20
FLEX, TUNED = "torch flex attention", "max-autotune-no-cudagraphs"
Calls = dict[str, Any]


def peers(
    tiles: AttentionTiles,
    causal: bool,
    inputs: list[jax.Array],
    backward: bool,
    tuned: bool,
    plans: dict[str, float],
) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """Names, and what makes calls as `bench_attention.jax_calls` does.

    backward: where there is one; tuned: also FlexAttention that tries its tiles, which
    takes minutes for a backward pass. plans: where FlashInfer's seconds on the host go,
    by name.
    """
    backward = backward and common.on_gpu()  # FlexAttention has none on the CPU
    flex = functools.partial(_flex, tiles, causal, inputs)
    yield FLEX, functools.partial(flex, backward, "default")
    if tuned:
        yield f"{FLEX}, tuned", functools.partial(flex, False, TUNED)
    shared = tiles.indices.shape[1] == 1
    kind = "one list" if shared else "a map for each KV head"
    for backend in BACKENDS if common.on_gpu() else ():
        name = f"flashinfer, {kind}, {backend}"
        make = _flashinfer_shared if shared else _flashinfer_by_head
        yield name, functools.partial(make, tiles, causal, inputs, backend, name, plans)


def versions() -> dict[str, str]:
    """Of those that are here."""
    found = {}
    for name in ("torch", "triton", "flashinfer"):
        if importlib.util.find_spec(name) is not None:
            found[name] = str(importlib.import_module(name).__version__)
    return found


def _on_torch(inputs: list[jax.Array]) -> list[Any]:
    import torch

    jax.block_until_ready(inputs)
    return [torch.from_dlpack(x) for x in inputs]


def _rows(x: Any) -> np.ndarray:
    """As `attention_peers.rows`; little is copied to the host."""
    sampled: np.ndarray = x[:, :: attention_peers.sample(x.shape[1])].float().cpu()
    return np.asarray(sampled)


def _wait(_: Any) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- FlexAttention -------------------------------------------------------------------


def _flex(
    tiles: AttentionTiles,
    causal: bool,
    inputs: list[jax.Array],
    backward: bool,
    mode: str,
) -> Calls:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v, d_o = (x.transpose(1, 2) for x in _on_torch(inputs))
    for x in (q, k, v):
        x.requires_grad_(backward)
    mask = _block_mask(tiles, causal, backward, q.device)
    torch._dynamo.reset()  # other cases' programs do not count as attempts at this one
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    fewer = q.shape[1] != k.shape[1]

    def forward() -> Any:
        return compiled(q, k, v, block_mask=mask, enable_gqa=fewer)

    def forward_alone() -> Any:
        with torch.no_grad():
            return forward()

    def both() -> Any:
        out = forward()
        return out.detach(), torch.autograd.grad(out, (q, k, v), d_o)

    calls: Calls = {
        "forward": forward_alone,
        "wait": _wait,
        "numpy": lambda x: _rows(x.detach().transpose(1, 2)),
    }
    return {**calls, "both": both} if backward else calls


def _block_mask(
    tiles: AttentionTiles, causal: bool, backward: bool, device: Any
) -> Any:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    indices, counts = np.asarray(tiles.indices), np.asarray(tiles.counts)
    rows = indices.shape[2]
    wide = np.zeros((*counts.shape, rows), np.int32)  # as many columns as rows
    width = min(rows, indices.shape[-1])
    wide[..., :width] = np.maximum(indices[..., :width], 0)
    own, some = np.zeros_like(wide), np.zeros_like(counts)
    if causal:  # the last of each list is the row's own
        last = np.take_along_axis(wide, counts[..., None] - 1, -1)[..., 0]
        assert (last == np.arange(rows)).all(), "a row does not end with its own tile"
        own[..., 0], some, counts = last, np.ones_like(counts), counts - 1

    def put(x: np.ndarray) -> Any:
        return torch.tensor(x, device=device)

    return BlockMask.from_kv_blocks(
        *(put(some), put(own), put(counts), put(wide)),
        BLOCK_SIZE=(tiles.block_q, tiles.block_kv),
        mask_mod=_causal if causal else None,
        compute_q_blocks=backward,
    )


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


# ---- FlashInfer ----------------------------------------------------------------------


def prepare_flashinfer(dim: int, causal: bool) -> None:
    """Compiles its kernels, all at once: a tiny plan and a run of each.

    Errors come again where the kernels are asked for.
    """
    if not common.on_gpu() or importlib.util.find_spec("flashinfer") is None:
        return

    def one(backend: str) -> None:
        import torch

        wrapper = _wrapper("BlockSparseAttentionWrapper", backend)
        lists = (torch.tensor(x, dtype=torch.int32).cuda() for x in ([0, 1], [0]))
        _plan_shared(wrapper, lists, 128, (8, 2, dim), causal)

    with ThreadPoolExecutor(len(BACKENDS)) as pool:
        for made in [pool.submit(one, backend) for backend in BACKENDS]:
            made.exception()


def _wrapper(name: str, backend: str) -> Any:
    import flashinfer
    import torch

    room = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    return getattr(flashinfer, name)(room, backend=backend)


def _plan_shared(
    wrapper: Any, lists: Any, length: int, heads: tuple[int, int, int], causal: bool
) -> None:
    import torch

    names = ("q_data_type", "kv_data_type", "o_data_type")
    types = dict.fromkeys(names, torch.bfloat16)
    sizes = (length, length, 128, 128)
    wrapper.plan(*lists, *sizes, *heads, causal=causal, **types)


def _planned(name: str, plans: dict[str, float], plan: Callable[[], None]) -> None:
    """Plans twice, the first time to compile, and notes the second one's seconds."""
    plan()
    _wait(None)
    begin = time.perf_counter()
    plan()
    _wait(None)
    plans[name] = time.perf_counter() - begin


def _flashinfer_shared(
    tiles: AttentionTiles,
    causal: bool,
    inputs: list[jax.Array],
    backend: str,
    name: str,
    plans: dict[str, float],
) -> Calls:
    import torch

    q, k, v = (x[0] for x in _on_torch(inputs)[:3])
    indices, counts = (np.asarray(x)[0, 0] for x in (tiles.indices, tiles.counts))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    listed = indices[np.arange(indices.shape[1]) < counts[:, None]]
    lists = tuple(torch.tensor(x, device="cuda") for x in (starts, listed))
    wrapper = _wrapper("BlockSparseAttentionWrapper", backend)
    heads = (q.shape[1], k.shape[1], q.shape[2])
    _planned(name, plans, lambda: _plan_shared(wrapper, lists, len(q), heads, causal))
    return {
        "forward": lambda: wrapper.run(q, k, v),
        "wait": _wait,
        "numpy": lambda x: _rows(x[None]),
    }


def _flashinfer_by_head(
    tiles: AttentionTiles,
    causal: bool,
    inputs: list[jax.Array],
    backend: str,
    name: str,
    plans: dict[str, float],
) -> Calls:
    """Query heads of a KV head must have one list."""
    import torch

    # As it takes them: [heads, S, D], in a row.
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in _on_torch(inputs)[:3])
    heads, rows = len(k), tiles.indices.shape[2]
    group = len(q) // heads
    indices, counts = (np.asarray(x)[0] for x in (tiles.indices, tiles.counts))
    assert (
        indices.reshape(heads, group, -1)
        == indices[::group, None].reshape(heads, 1, -1)
    ).all(), "query heads of a KV head have lists of their own"
    mask = np.zeros((heads, rows, rows + 1), bool)
    used = np.arange(indices.shape[2]) < counts[::group, :, None]
    np.put_along_axis(mask, np.where(used, indices[::group], rows), True, -1)
    listed = torch.tensor(mask[..., :rows], device="cuda")
    sizes = torch.full((heads, rows), tiles.block_q, dtype=torch.int32, device="cuda")
    wrapper = _wrapper("VariableBlockSparseAttentionWrapper", backend)
    counted = (len(q), heads, q.shape[2])
    _planned(
        name,
        plans,
        lambda: wrapper.plan(
            *(listed, sizes, sizes, *counted),
            causal=causal,
            q_data_type=torch.bfloat16,
        ),
    )
    return {
        "forward": lambda: wrapper.run(q, k, v),
        "wait": _wait,
        "numpy": lambda x: _rows(x.transpose(0, 1)[None]),
    }
