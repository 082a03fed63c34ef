"""Attention over a sequence that is cut over GPUs, as others have it.

    python benchmarks/parallel_peers.py --devices 2 --lengths 16384 32768 131072

The work of `bench_parallel.py`, without its documents, on N GPUs of one machine:

- cuDNN in JAX, all_gather: rows in zigzag; XLA gathers keys and values. cuDNN's causal
  mask begins at the first query and the first key. So each chunk meets its own keys
  causally, and those before it without a mask: which, a `lax.switch` over the device
  says. What both gave is merged by its logsumexp. That, and its gradient, take
  functions that jax keeps private.
- cuDNN in JAX, ulysses: each device has all rows of a part of the heads. Rows are cut
  in their order.
- `context_parallel` in torch: rows in zigzag, and either way to rotate keys and values.
  One process a GPU; the slowest rank's time counts. Where it refuses fewer KV heads
  than heads, they are repeated beforehand, and the row says so.

Efficiency is time on one / (n × time on n), by the same kernels. Before anything is
timed, it is compared with one device's results, gradients too. The rows of torch on
one GPU are of all ranks at once, each for itself.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The files beside this one, also under `python -P`.
sys.path.insert(0, str(Path(__file__).resolve().parent))

RANK = "--rank"  # a process of torch's, which has no jax in it
if RANK in sys.argv:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel
else:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from bench_parallel import DIM, DTYPE, HEADS, KV_HEADS, Length
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    from support import common
    from support.common import Results
    from support.rounds import median_seconds

    from jax_kvblock.parallel import from_zigzag

WORKS = ("forward", "both")
LENGTHS = (16384, 32768, 131072)
WAYS = ("all_gather", "ulysses")
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
ROTATE = ("allgather", "alltoall")
# Absolute for out; for a gradient, of its greatest element.
TOLERANCE = 0.02
ROUNDS, ROUND = 9, 0.03  # as in support/rounds.py
ROUNDS_OF_ONE = 3  # of one GPU in torch, which has but itself to wait for
TORCH_LIMIT = 300  # seconds for all of torch


def main() -> None:
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--backends", nargs="*", choices=BACKENDS, default=["flash"])
    options = parser.parse_args()
    if options.quick:
        options.lengths = [1024]
    # Before jax looks at the GPUs, of which it would take most of the memory.
    from_torch = _in_torch(options) if options.backends else []
    bench = functools.partial(_bench, from_torch)
    outcome = common.run_bench("parallel-peers", bench, options)
    for failure in outcome[1]:
        print(f"did not run: {failure}")
    sys.exit(common.exit_status([outcome], options))


def _bench(
    from_torch: list[dict[str, Any]], options: argparse.Namespace, results: Results
) -> None:
    for said in from_torch:
        where = _name(said["tokens"]), said["who"]
        if "refused" in said:
            print(f"{where[0]:42} {where[1]:25} REFUSED: {said['refused'][:300]}")
        elif "failed" in said:
            results.fail(*where, said["failed"])
        else:
            _report(results, *where, said["seconds"], said["one"], options.devices)
    results.save()
    if len(jax.devices()) < options.devices:
        error = f"{options.devices} devices are asked for, {len(jax.devices())} here"
        results.fail("all", _jax_name(), error)
        return
    for tokens in options.lengths:
        _in_jax(tokens, options, results)
        gc.collect()
        results.save()


def _name(tokens: int | None) -> str:
    return Length(tokens).name if tokens else "all"


def _report(
    results: Results, case: str, who: str, seconds: Any, one: Any, n: int
) -> None:
    """Times by work; and efficiency, where there are those of one."""
    for work in WORKS:
        at = f"{case} / {work}"
        results.add(at, who, "time", seconds[work] * 1e3, "ms")
        if one:
            share = one[work] / n / seconds[work]
            results.add(at, who, "efficiency", share, "")


# ---- cuDNN in JAX --------------------------------------------------------------------


def _jax_name() -> str:
    return "peer cudnn in jax" if common.on_gpu() else "peer xla"


def _in_jax(tokens: int, options: argparse.Namespace, results: Results) -> None:
    n, case = options.devices, _name(tokens)
    mesh = Mesh(np.array(jax.devices()[:n]), ("context",))
    rows = P(None, "context")
    backend = "cudnn" if common.on_gpu() else "xla"
    whole = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=backend
    )
    try:
        one = _Compiled(whole, _drawn(tokens, None))
    except Exception as error:
        results.fail(case, _jax_name(), error)
        return
    running = {_jax_name(): one}
    for way in options.ways:
        who = f"{_jax_name()}, {n}, {way}"
        local = _gathered(n) if way == "all_gather" else _ulysses(whole)
        # Its own checks of what varies over devices do not know cuDNN's primitives.
        attend = jax.shard_map(
            local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows, check_vma=False
        )
        try:
            made = _Compiled(attend, _drawn(tokens, NamedSharding(mesh, rows)))
            _compare(made, one, n if way == "all_gather" else None)
            running[who] = made
        except Exception as error:
            results.fail(case, who, error)
    calls = {
        (who, work): functools.partial(made.run, work)
        for who, made in running.items()
        for work in WORKS
    }
    times = median_seconds(calls, options.quick)
    alone = {work: times[_jax_name(), work] for work in WORKS}
    for who, made in running.items():
        seconds = {work: times[who, work] for work in WORKS}
        _report(results, case, who, seconds, None if made is one else alone, n)


class _Compiled:
    """Both works of a function of q, k and v, and what they are called with."""

    def __init__(self, attend: Callable[..., Any], args: Any) -> None:
        def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(d_out)

        self.args = args
        self._compiled = {
            "forward": jax.jit(attend).lower(*args[:-1]).compile(),
            "both": jax.jit(both).lower(*args).compile(),
        }

    def run(self, work: str, args: Any = None) -> Any:
        args = self.args if args is None else args
        return self._compiled[work](*(args if work == "both" else args[:-1]))


def _drawn(tokens: int, place: Any) -> tuple[jax.Array, ...]:
    """q, k, v and the gradient of out."""
    made = []
    for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS)):
        shape = (1, tokens, heads, DIM)
        draw = functools.partial(jax.random.normal, shape=shape, dtype=DTYPE)
        made.append(jax.jit(draw, out_shardings=place)(jax.random.key(i)))
    return tuple(made)


def _compare(made: _Compiled, one: _Compiled, zigzag: int | None) -> None:
    """Raises where a result is not that of one device."""

    def natural(a: jax.Array) -> jax.Array:
        here = jax.device_put(a, jax.devices()[0])
        return from_zigzag(here, zigzag) if zigzag else here

    want = one.run("both", tuple(map(natural, made.args)))
    got = tuple(map(natural, made.run("both")))
    forward = natural(made.run("forward"))
    for name, a, b in zip(
        ("out", "out", "dq", "dk", "dv"), (forward, *got), (want[0], *want), strict=True
    ):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        _judge(name, float(jnp.abs(a - b).max()), float(jnp.abs(b).max()))


def _judge(name: str, off: float, greatest: float) -> None:
    limit = TOLERANCE * (1 if name == "out" else greatest)
    if not off <= limit:  # nan too
        raise AssertionError(
            f"{name} is off by {off:.3g} from one device's, allowed {limit:.3g}"
        )


def _ulysses(whole: Callable[..., Any]) -> Callable[..., Any]:
    def local(q: Any, k: Any, v: Any) -> Any:
        exchange = functools.partial(
            jax.lax.all_to_all, axis_name="context", tiled=True
        )
        heads = (exchange(a, split_axis=2, concat_axis=1) for a in (q, k, v))
        return exchange(whole(*heads), split_axis=1, concat_axis=2)

    return local


def _gathered(n: int) -> Callable[..., Any]:
    """A device's rows, which are chunks i and 2n - 1 - i of 2n."""
    forward, backward = _cudnn() if common.on_gpu() else _xla()

    def local(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, gather(k), gather(v))

    def gather(a: Any) -> Any:
        """All rows in their order."""
        a = jax.lax.all_gather(a, "context", axis=1, tiled=True)
        pairs = a.reshape(n, 2, -1, *a.shape[2:])
        ordered = jnp.concatenate([pairs[:, 0], pairs[::-1, 1]])
        return ordered.reshape(a.shape)

    def switch(branch: Callable[..., Any], *args: Any) -> Any:
        """`branch` of this device, to which places of chunks are numbers."""
        branches = [functools.partial(branch, (i, 2 * n - 1 - i)) for i in range(n)]
        return jax.lax.switch(jax.lax.axis_index("context"), branches, *args)

    def before(places: Any, q: Any, keys: Any, values: Any) -> Any:
        """Of both chunks, over all keys before each."""
        outs, lses = [], []
        for i, place in enumerate(places):
            if place == 0:
                outs.append(jnp.zeros_like(q[:1]))
                lses.append(jnp.full((1, q.shape[2], q.shape[1]), -jnp.inf))
                continue
            end = place * q.shape[1]
            made = forward(q[i : i + 1], keys[:, :end], values[:, :end], False)
            outs.append(made[0])
            lses.append(made[1])
        return jnp.concatenate(outs), jnp.concatenate(lses)

    def d_before(
        places: Any, q: Any, keys: Any, values: Any, out: Any, lse: Any, d_out: Any
    ) -> Any:
        d_q, sums = [], []
        for i, place in enumerate(places):
            if place == 0:
                d_q.append(jnp.zeros_like(q[:1]))
                continue
            end, at = place * q.shape[1], slice(i, i + 1)
            seen = q[at], keys[:, :end], values[:, :end]
            made = backward(*seen, out[at], lse[at], d_out[at], False)
            d_q.append(made[0])
            rest = [(0, 0), (0, keys.shape[1] - end), (0, 0), (0, 0)]
            sums.append([jnp.pad(d, rest) for d in made[1:]])
        d_keys, d_values = (
            functools.reduce(jnp.add, d) for d in zip(*sums, strict=True)
        )
        return jnp.concatenate(d_q), d_keys, d_values

    def both_parts(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
        own = forward(q, k, v, True)
        return _merged(own, switch(before, q, keys, values))

    def chunks(a: Any) -> Any:
        return a.reshape(2, -1, *a.shape[2:])

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
        return run(q, k, v, keys, values)[0]

    def run(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
        out, lse = both_parts(chunks(q), chunks(k), chunks(v), keys, values)
        return out.reshape(q.shape), (q, k, v, keys, values, out, lse)

    def pull(saved: Any, d_out: Any) -> Any:
        q, k, v, keys, values, out, lse = saved
        q2, k2, v2, d_out = map(chunks, (q, k, v, d_out))
        own = backward(q2, k2, v2, out, lse, d_out, True)
        d_q, *d_rest = switch(d_before, q2, keys, values, out, lse, d_out)
        d_q = (own[0] + d_q).reshape(q.shape)
        return d_q, own[1].reshape(k.shape), own[2].reshape(v.shape), *d_rest

    attend.defvjp(run, pull)
    return local


def _merged(one: Any, other: Any) -> Any:
    """(out [B, T, N, D], logsumexp [B, N, T]) over the keys of both."""
    lse = jnp.logaddexp(one[1], other[1])

    def share(out: Any, part: Any) -> Any:
        weight = jnp.exp(part - lse).swapaxes(1, 2)[..., None]
        return weight * out.astype(jnp.float32)

    return (share(*one) + share(*other)).astype(one[0].dtype), lse


def _cudnn() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward, with its logsumexp; and backward, given that and out over all keys."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    masks = {True: cudnn.MaskType.CAUSAL, False: cudnn.MaskType.NO_MASK}
    layout, scale = cudnn.AttentionLayout.BTNH.value, DIM**-0.5

    def forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
        mask = masks[causal]
        return cudnn.dot_product_attention(
            q, k, v, scale=scale, mask_type=mask, return_residual=True
        )

    def backward(
        q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, causal: bool
    ) -> Any:
        none = (jnp.zeros(0, q.dtype),) * 7  # bias, lengths, offsets, pages
        saved = (q, k, v, *none, lse, out)
        # Scale, seed, dropout, bias and its gradient, ..., window.
        options = (scale, 42, 0.0, (False, False), masks[causal], layout, None)
        version = cudnn.check_cudnn_version()
        rule = cudnn._dot_product_attention_bwd_rule
        return rule(*options, version, False, saved, d_out)[:3]

    return forward, backward


def _xla() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The same for CPUs, where it is the script that is tested."""

    def scores(q: Any, k: Any, causal: bool) -> Any:
        q, k = (a.astype(jnp.float32) for a in (q, k))
        q = q.reshape(*q.shape[:2], k.shape[2], -1, DIM)
        s = jnp.einsum("btkgd,bskd->bkgts", q, k) * DIM**-0.5
        seen = jnp.tril(jnp.ones(s.shape[-2:], bool))
        return jnp.where(seen, s, -jnp.inf) if causal else s

    def forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
        s = scores(q, k, causal)
        lse = jax.nn.logsumexp(s, axis=-1)
        p = jnp.exp(s - lse[..., None])
        out = jnp.einsum("bkgts,bskd->btkgd", p, v.astype(jnp.float32))
        return out.reshape(q.shape).astype(q.dtype), lse.reshape(
            q.shape[0], q.shape[2], q.shape[1]
        )

    def backward(
        q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, causal: bool
    ) -> Any:
        s, pull = jax.vjp(lambda q, k: scores(q, k, causal), q, k)
        p = jnp.exp(s - lse.reshape(s.shape[:-1])[..., None])
        v, out, d_out = (a.astype(jnp.float32) for a in (v, out, d_out))
        split = (*q.shape[:2], k.shape[2], -1, DIM)
        delta = (out * d_out).sum(-1).reshape(split[:-1])
        d_out = d_out.reshape(split)
        d_v = jnp.einsum("bkgts,btkgd->bskd", p, d_out)
        d_p = jnp.einsum("btkgd,bskd->bkgts", d_out, v)
        d_s = p * (d_p - delta.transpose(0, 2, 3, 1)[..., None])
        return *pull(d_s), d_v.astype(k.dtype)

    return forward, backward


# ---- torch, in processes of its own --------------------------------------------------


def _in_torch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What rank 0 said, and why it said no more."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = {
            "heads": (HEADS, KV_HEADS, DIM),
            "n": options.devices,
            "lengths": list(options.lengths),
            "backends": list(options.backends),
            "quick": options.quick,
            "folder": name,
        }
        with contextlib.ExitStack() as stack:
            ranks = []
            for rank in range(options.devices):
                errors = stack.enter_context(_errors(folder, rank).open("w"))
                words = json.dumps({"rank": rank} | asked)
                command = [sys.executable, "-P", __file__, RANK, words]
                ranks.append(
                    subprocess.Popen(command, stdout=errors, stderr=subprocess.STDOUT)
                )
            problem = _await(ranks, folder)
        rows = folder / "said"
        lines = rows.read_text().splitlines() if rows.exists() else []
    said = [json.loads(line) for line in lines]
    if problem:
        said.append({"tokens": None, "who": "peer torch", "failed": problem})
    return said


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"errors-{rank}"


def _await(ranks: list[subprocess.Popen[bytes]], folder: Path) -> str:
    """Waits for all; ends them when one has failed, or time is up."""

    def failed() -> list[int]:
        return [i for i, rank in enumerate(ranks) if rank.poll()]

    until = time.monotonic() + TORCH_LIMIT
    try:
        while any(rank.poll() is None for rank in ranks):
            if failed():
                break
            if time.monotonic() > until:
                return f"not done after {TORCH_LIMIT} s"
            time.sleep(0.1)
        if not failed():
            return ""
        first = failed()[0]
        lines = _errors(folder, first).read_text().splitlines()
        told = [line for line in lines if "Error" in line] or lines or ["no message"]
        return f"rank {first}: {told[-1]}"
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


class _Rank:
    """One process of torch's: everything in it happens on all ranks alike."""

    def __init__(
        self, rank: int, n: int, heads: Any, quick: bool, folder: str, **rest: Any
    ) -> None:
        self.rank, self.n, self.quick = rank, n, quick
        self.heads, self.kv_heads, self.dim = heads
        self._said = Path(folder) / "said"
        gpu = torch.cuda.is_available()
        if gpu and torch.cuda.device_count() < n:
            raise RuntimeError(f"{n} GPUs asked for, {torch.cuda.device_count()} here")
        self.device = torch.device("cuda", rank) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=n,
            device_id=self.device if gpu else None,
        )
        self.mesh = init_device_mesh(self.device.type, (n,))

    def say(self, **said: Any) -> None:
        if self.rank == 0:
            with self._said.open("a") as file:
                print(json.dumps(said), file=file)

    def greatest(self, value: float) -> float:
        """Of all ranks, which then are as far as one another."""
        found = torch.tensor(value, device=self.device, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()  # waits

    def tried(self, do: Callable[[], Any]) -> tuple[Any, str]:
        """What it returns, and this rank's error, another's, or none."""
        made, error = None, ""
        try:
            made = do()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        if self.greatest(float(bool(error))):
            return None, error or "another rank failed"
        return made, ""

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Of a call, on the slowest rank."""
        self._wait()
        self.greatest(0.0)
        begun = time.perf_counter()
        for _ in range(count):
            call()
        self._wait()
        return self.greatest((time.perf_counter() - begun) / count)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def medians(self, calls: dict[Any, Callable[[], Any]], rounds: int) -> Any:
        """Of calls that take turns, in an order that is the same on all ranks."""
        for call in calls.values():
            self.seconds(call, 1)
        counts = {
            key: 1
            if self.quick
            else max(1, min(50, int(ROUND / self.seconds(call, 1))))
            for key, call in calls.items()
        }
        found: dict[Any, list[float]] = {key: [] for key in calls}
        order = random.Random(0)
        for _ in range(1 if self.quick else rounds):
            for key in order.sample(list(calls), len(calls)):
                found[key].append(self.seconds(calls[key], counts[key]))
        return {key: statistics.median(times) for key, times in found.items()}

    # -- the work --

    def run(self, tokens: int, backend: str) -> None:
        """Of one GPU, then of all; with as few KV heads as it takes."""
        who = f"peer torch {torch.__version__.split('+')[0]} {backend}"
        with sdpa_kernel(getattr(SDPBackend, BACKENDS[backend])):
            drawn = self._drawn(tokens)
            one, error = self.tried(lambda: self._of_one(drawn))
            if error:
                self.say(tokens=tokens, who=who, failed=error)
                return
            want, times = one
            self.say(tokens=tokens, who=who, seconds=times, one=None)
            refused = self._of_all(tokens, who, drawn, want, times, 1)
            if refused:
                self.say(tokens=tokens, who=f"{who}, {self.n}", refused=refused)
                who += " of repeated KV heads"
                repeat = self.heads // self.kv_heads
                self._of_all(tokens, who, drawn, want, times, repeat)

    def _drawn(self, tokens: int) -> list[Any]:
        """q, k, v and the gradient of out, whole, the same on all ranks."""
        made = []
        for i, heads in enumerate((self.heads, *[self.kv_heads] * 2, self.heads)):
            source = torch.Generator(self.device).manual_seed(i)
            made.append(
                torch.randn(
                    (1, heads, tokens, self.dim),
                    generator=source,
                    device=self.device,
                    dtype=torch.bfloat16,
                )
            )
        return made

    def _works(self, args: Any) -> dict[str, Callable[[], Any]]:
        """Calls of whatever scaled_dot_product_attention is now."""
        *qkv, d_out = args
        qkv = [a.detach().requires_grad_() for a in qkv]
        fewer = qkv[0].shape[1] != qkv[1].shape[1]

        def attend() -> Any:
            return F.scaled_dot_product_attention(
                *qkv, is_causal=True, enable_gqa=fewer
            )

        def forward() -> Any:
            with torch.no_grad():
                return (attend(),)

        def both() -> Any:
            out = attend()
            return out.detach(), *torch.autograd.grad(out, qkv, d_out)

        return {"forward": forward, "both": both}

    def _of_one(self, drawn: Any) -> Any:
        """This rank's rows of out and gradients, and times."""
        works = self._works(drawn)
        want = [self._own(a) for a in works["both"]()]
        return want, self.medians(works, ROUNDS_OF_ONE)

    def _own(self, a: Any) -> Any:
        chunks = a.chunk(2 * self.n, dim=2)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim=2)

    def _of_all(
        self, tokens: int, who: str, drawn: Any, want: Any, one: Any, repeat: int
    ) -> str:
        """Why it refuses KV heads that are not repeated; empty where it does not."""
        q, k, v, d_out = (a.clone() for a in drawn)
        k, v = (a.repeat_interleave(repeat, dim=1) for a in (k, v))
        buffers = [q, k, v, d_out]
        with context_parallel(
            self.mesh,
            buffers=buffers,
            buffer_seq_dims=[2] * 4,
            no_restore_buffers=set(buffers),
        ):  # in which buffers are cut, and attention is another function
            works = self._works(buffers)

            def turned(way: str, work: str) -> Any:
                set_rotate_method(way)
                return works[work]()

            failed = {}
            for way in ROTATE:
                check = functools.partial(self._check, turned, way, want, repeat)
                failed[way] = self.tried(check)[1]
            calls = {
                (way, work): functools.partial(turned, way, work)
                for way in ROTATE
                for work in WORKS
                if not failed[way]
            }
            times, error = self.tried(lambda: self.medians(calls, ROUNDS))
        if repeat == 1 and all(failed.values()):
            return failed[ROTATE[0]]
        for way in ROTATE:
            name = f"{who}, {self.n}, {way}"
            if failed[way] or error:
                self.say(tokens=tokens, who=name, failed=failed[way] or error)
                continue
            seconds = {work: times[way, work] for work in WORKS}
            self.say(tokens=tokens, who=name, seconds=seconds, one=one)
        return ""

    def _check(
        self, turned: Callable[..., Any], way: str, want: Any, repeat: int
    ) -> None:
        (forward,) = turned(way, "forward")
        out, d_q, *d_kv = turned(way, "both")
        d_kv = [d.unflatten(1, (-1, repeat)).sum(2, dtype=torch.float32) for d in d_kv]
        for name, a, b in zip(
            ("out", "out", "dq", "dk", "dv"),
            (forward, out, d_q, *d_kv),
            (want[0], *want),
            strict=True,
        ):
            b = b.float()
            _judge(name, (a.float() - b).abs().max().item(), b.abs().max().item())


def _rank(lengths: list[int], backends: list[str], **asked: Any) -> None:
    rank = _Rank(**asked)
    for tokens in lengths:
        for backend in backends:
            rank.run(tokens, backend)
            gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    if RANK in sys.argv:
        _rank(**json.loads(sys.argv[-1]))
    else:
        main()
