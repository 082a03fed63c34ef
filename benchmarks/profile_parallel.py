"""What runs under what, in a ring over several GPUs: recorded, and drawn.

    python benchmarks/profile_parallel.py --record profile.json --commit HASH
    python benchmarks/profile_parallel.py --draw profile.json -o docs/ring_profile.svg

Records forward and backward of one causal sequence, as jit is and with
`compiler_options()`: the last of five calls that follow each other, on each GPU.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

TOKENS = 16384
WAYS = {"as jit is": False, "with compiler_options()": True}
# What kernels are called, and in which colour they are drawn; the first that matches.
KINDS = {
    "attention": (r"Attention(Forward|BackwardKv)", "#0072B2"),
    "finishing dq": (r"AttentionFinish", "#56B4E9"),
    "sends": (r"nccl|MemcpyP2P", "#D55E00"),
    "merges, sums, casts, copies": (r"fusion|Memset|memset|Memcpy", "#999999"),
}


# ---- recording -----------------------------------------------------------------------


def record(path: Path, commit: str) -> None:
    import jax
    import numpy as np
    from bench_parallel import Length, both, drawn
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jax_kvblock.parallel import compiler_options, context_parallel_attention

    devices = jax.devices()
    mesh, rows = Mesh(np.array(devices), ("context",)), P(None, "context")
    args = drawn(Length(TOKENS), 1, NamedSharding(mesh, rows))
    found: dict[str, Any] = {}
    for name, tuned in WAYS.items():
        local = functools.partial(
            context_parallel_attention, axis_name="context", strategy="ring",
            causal=True, compiler_options=tuned,
        )  # fmt: skip
        over = jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
        options = compiler_options() if tuned else None
        jit = jax.jit(functools.partial(both, over), compiler_options=options)
        call = jit.lower(*args).compile()
        found[name] = _events(lambda call=call: call(*args), len(devices))
    document = {
        "device": devices[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "versions": {"jax": jax.__version__},
        "profiles": found,
    }
    path.write_text(json.dumps(document, indent=1))


def _events(call: Any, count: int) -> dict[str, list[list[Any]]]:
    """Of each GPU [start, duration, stream, name], in microseconds."""
    import jax

    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(5):
                made = call()
            jax.block_until_ready(made)
        (file,) = Path(folder).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    found: dict[str, list[list[Any]]] = {}
    for plane in data.planes:
        number = re.search(r"GPU:(\d+)", plane.name)
        if not number or int(number[1]) >= count:
            continue
        events = sorted(
            [e.start_ns / 1e3, e.duration_ns / 1e3, line.name.split("(")[0], e.name]
            for line in plane.lines
            if "Stream" in line.name
            for e in line.events
        )
        found[f"GPU {number[1]}"] = last_call(events)
    return found


def last_call(events: list[list[Any]]) -> list[list[Any]]:
    """Those behind the last but one sum of the gradients, from 0 on."""
    begins = [i for i, e in enumerate(events) if "AttentionForward" in e[3]]
    first = begins[-2] if len(begins) > 1 else 0  # two calls forward
    while first and events[first][0] - sum(events[first - 1][:2]) < 3:
        name = events[first - 1][3]
        if "convert" in name or "Finish" in name:
            break
        first -= 1
    own = events[first:]
    start = own[0][0]
    return [[round(t - start, 1), round(d, 1), *rest] for t, d, *rest in own]


# ---- drawing -------------------------------------------------------------------------


def kind_of(name: str) -> str | None:
    return next((k for k, (p, _) in KINDS.items() if re.search(p, name)), None)


def draw(document: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "ring", "svg.fonttype": "none", "font.size": 9}
    profiles = document["profiles"]
    figure, all_axes = plt.subplots(
        len(profiles), 1, figsize=(8, 1 + 1.2 * len(profiles)), sharex=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axes, (name, by_gpu) in zip(all_axes[:, 0], profiles.items(), strict=True):
        for start, duration, _, kernel in by_gpu["GPU 0"]:
            kind = kind_of(kernel)
            if kind is None:
                continue
            lane = 1 if kind == "sends" else 0
            axes.broken_barh(
                [(start / 1e3, duration / 1e3)], (1.05 - lane, 0.9),
                color=KINDS[kind][1], linewidth=0,
            )  # fmt: skip
        axes.set_yticks([0.5, 1.5], ["sends", "kernels"])
        axes.set_title(name, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1, 0].set_xlabel("milliseconds")
    marks = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in KINDS.values()]
    figure.legend(marks, KINDS, loc="outside upper right", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--draw", type=Path, metavar="FILE")
    parser.add_argument("-o", "--out", type=Path, default=Path("ring_profile.svg"))
    options = parser.parse_args()
    if options.record:
        record(options.record, options.commit)
    if options.draw:
        draw(json.loads(options.draw.read_text()), options.out)


if __name__ == "__main__":
    main()
