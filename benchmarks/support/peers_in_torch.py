"""`context_parallel` in torch on one rank, in a process without jax.

Run as a script with a JSON of what is asked for. Rows lie in zigzag, and keys and
values rotate either way; the slowest rank's time counts. Where it refuses fewer KV
heads than heads, they are repeated beforehand, and the row says so. The times of one
GPU are of all ranks at once, each for itself.
"""

from __future__ import annotations

import functools
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also under `python -P`
from support.peer_work import WORKS, judge

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
ROTATE = ("allgather", "alltoall")
ROUNDS, ROUND = 9, 0.03  # as in rounds.py
ROUNDS_OF_ONE = 3  # of one GPU, which has but itself to wait for


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
        tries = 1 if self.quick else 5  # the first calls can take many times as long
        once = {
            key: min(self.seconds(call, 1) for _ in range(tries))
            for key, call in calls.items()
        }
        counts = {
            key: 1 if self.quick else max(1, min(50, int(ROUND / seconds)))
            for key, seconds in once.items()
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
            judge(name, (a.float() - b).abs().max().item(), b.abs().max().item())


def _rank(lengths: list[int], backends: list[str], **asked: Any) -> None:
    rank = _Rank(**asked)
    for tokens in lengths:
        for backend in backends:
            rank.run(tokens, backend)
            gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(**json.loads(sys.argv[-1]))
