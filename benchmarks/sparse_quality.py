"""How good selectors are on a real model's attention: SmolLM2-135M reading real text.

    python benchmarks/sparse_quality.py [--model FILE.gguf] [--loss]
    python benchmarks/sparse_quality.py --activations FILE.npz     without the model

The model is `examples/smollm2/`, and its weights are fetched unless a file is given.
The texts are those that come with Python: the language's reference
(`pydoc_data.topics`) and modules' source. Queries, keys and values of some layers,
rotated, rounded to bfloat16, are given to every selector at several budgets; rows are
recall of attention's mass (mean, and the worst row), the output's error, and the share
of tiles. Gates are trained on other texts than those that are measured: other parts of
the reference, and other modules. With --loss, the whole model reads the texts while a
selector chooses the tiles of every layer, and a row is its next-token loss in nats;
gates are left out.

--cases picks selectors by name. --save-activations FILE keeps what is measured, and the
gates, for another machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import common, reading
from support.common import OURS, Results

from jax_kvblock.sparse import (
    AntidiagonalThreshold,
    BlockSparse,
    Gate,
    LearnedGate,
    LocalGlobal,
    Oracle,
    PooledThreshold,
    Random,
    Selector,
    Streaming,
    Strided,
    evaluate_selector,
    init_gate,
    sparse_attention,
    tile_mass,
    train_gate,
)

SIDE, PIECE = 128, 32
TOKENS = 8192  # of a text, the model's context
LAYERS = (5, 15, 25)
RATIOS = (0.9, 0.75, 0.5)
# Which parts of the reference, and which modules, gates learn from and are judged by.
LEARN = ("reference 0", "argparse inspect", "reference 2", "zipfile")
LEARN += ("reference 6", "tarfile")
JUDGE = ("reference 11", "typing ast")
STEPS = 200


# ---- the texts -----------------------------------------------------------------------


def tokens_of(model: reading.Model, name: str, count: int) -> np.ndarray:
    tokens = model.tokens(reading.text_of(name))[:count]
    if len(tokens) < count:
        raise ValueError(f"{name}: {len(tokens)} tokens, {count} are asked for")
    return tokens


# ---- activations and gates -----------------------------------------------------------


@dataclasses.dataclass
class Measured:
    """By (text, layer): q `[1, T, N, D]`, k and v; by layer: gates, by name.

    sources: what it is from, as results files have it.
    """

    arrays: dict[tuple[str, int], tuple[np.ndarray, ...]]
    gates: dict[int, dict[str, Gate]]
    sources: dict[str, str]

    def save(self, path: Path) -> None:
        flat = {
            f"{text}/{layer}/{name}": np.asarray(a).view(np.uint16)
            for (text, layer), arrays in self.arrays.items()
            for name, a in zip("qkv", arrays, strict=True)
        }
        for layer, gates in self.gates.items():
            for kind, gate in gates.items():
                for field in dataclasses.fields(gate):
                    key = f"{kind}/{layer}/gate.{field.name}"
                    flat[key] = np.asarray(getattr(gate, field.name))
        flat["sources"] = np.asarray(json.dumps(self.sources))
        with path.open("wb") as file:
            np.savez(file, **flat)  # type: ignore[arg-type, unused-ignore]

    @classmethod
    def load(cls, path: Path) -> Measured:
        arrays: dict[Any, dict[str, np.ndarray]] = {}
        gates: dict[int, dict[str, dict[str, Any]]] = {}
        with np.load(path) as file:
            flat = dict(file)
            sources = json.loads(str(flat.pop("sources")))
            for key, a in flat.items():
                text, layer, name = key.split("/")
                kind, _, field = name.partition(".")
                if kind == "gate":
                    gates.setdefault(int(layer), {}).setdefault(text, {})[field] = a
                else:
                    of_text = arrays.setdefault((text, int(layer)), {})
                    of_text[name] = a.view(jnp.bfloat16)
        return cls(
            {key: tuple(found[n] for n in "qkv") for key, found in arrays.items()},
            {
                layer: {kind: Gate(**parts) for kind, parts in found.items()}
                for layer, found in gates.items()
            },
            sources,
        )


def read(
    model: reading.Model, options: argparse.Namespace, results: Results
) -> Measured:
    """What is measured, and gates that have learned from other texts."""
    count, layers = max(options.lengths), options.layers
    learned: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {i: [] for i in layers}
    measured = Measured({}, {}, {"model": model.name, **dict(_sources(options))})
    for name in (*LEARN[: options.texts], *JUDGE):
        start = time.perf_counter()
        loss, kept = model.read(tokens_of(model, name, count), keep=layers)
        spent = time.perf_counter() - start
        print(f"{name}: {loss:.3f} nats a token, {spent:.0f} s", flush=True)
        for layer, arrays in kept.items():
            arrays = tuple(a.astype(jnp.bfloat16) for a in arrays)
            if name in JUDGE:
                measured.arrays[name, layer] = arrays
            else:
                learned[layer].append(arrays[:2])
        if name in JUDGE:
            case = f"{name}, {count} tokens / dense"
            results.add(case, model.name, "loss", loss, "nats", show=False)
    for layer in layers:
        measured.gates[layer] = gates_of(learned[layer], options.steps)
    return measured


def gates_of(texts: list[tuple[np.ndarray, np.ndarray]], steps: int) -> dict[str, Gate]:
    """One that knows tiles, and one that knows pieces of them."""
    q, k = texts[0]
    heads = (q.shape[2], k.shape[2], q.shape[3])
    found = {}
    for kind, side in (("tiles", SIDE), ("pieces", PIECE)):
        size = {"block_q": side, "block_kv": side}
        data = [
            (q, k, tile_mass(q, k, causal=True, **size))
            for q, k in (map(_wide, text) for text in texts)
        ]
        start = time.perf_counter()
        order = np.random.default_rng(0).integers(0, len(data), steps)
        gate, losses = train_gate(
            init_gate(*heads), (data[i] for i in order), causal=True, **size
        )
        spent = time.perf_counter() - start
        first, last = losses[: len(data)].mean(), losses[-len(data) :].mean()
        print(f"a gate of {kind}: {first:.3f} to {last:.3f} nats, {spent:.0f} s")
        found[kind] = gate
    return found


def _wide(a: Any) -> jax.Array:
    return jnp.asarray(a, jnp.float32 if not common.on_gpu() else jnp.bfloat16)


# ---- selectors -----------------------------------------------------------------------


def selectors(ratio: float, rows: int, gates: dict[str, Gate]) -> dict[str, Selector]:
    budget: dict[str, Any] = {"sparsity_ratio": ratio}
    scored: dict[str, Any] = {"tau": None, "sinks": 1, **budget}
    # As many tiles as the others list, so many in each row.
    windows = np.arange(1, rows + 1)
    listed = np.minimum(np.arange(1, rows + 1), windows[:, None] + 1).sum(1)
    wanted = (1 - ratio) * rows * (rows + 1) / 2
    window = int(windows[np.argmin(abs(listed - wanted))])
    return {
        "random": Random(**budget),
        "block sparse": BlockSparse(run=2, **budget),
        "strided": Strided(**budget),
        "local + global": LocalGlobal(num_global=1, **budget),
        "streaming": Streaming(sinks=1, window=window),
        **{
            f"threshold, stride {n}": AntidiagonalThreshold(stride=n, **scored)
            for n in (8, 16, 32)
        },
        **{
            f"pooled, pieces of {n}": PooledThreshold(piece=n, **scored)
            for n in (8, 16, 32, 64)
        },
        "learned, tiles": LearnedGate(gates["tiles"], **scored),
        f"learned, pieces of {PIECE}": LearnedGate(
            gates["pieces"], piece=PIECE, **scored
        ),
        "oracle": Oracle(**scored),
        # As many tiles in all, but each row may list as many as any other.
        "threshold, stride 16, evenly": AntidiagonalThreshold(
            tau=None, capacity=window + 1
        ),
        f"learned, pieces of {PIECE}, evenly": LearnedGate(
            gates["pieces"], piece=PIECE, capacity=window + 1
        ),
        "oracle, evenly": Oracle(capacity=window + 1),
    }


# ---- what is measured ----------------------------------------------------------------


def judge(measured: Measured, options: argparse.Namespace, results: Results) -> None:
    for length in options.lengths:
        for ratio in options.ratios:
            found: dict[str, list[Any]] = {}
            for (text, layer), arrays in measured.arrays.items():
                q, k, v = (_wide(a[:, :length]) for a in arrays)
                rows = -(-length // SIDE)
                made = selectors(ratio, rows, measured.gates[layer])
                for name, one in made.items():
                    if not re.search(options.cases, name):
                        continue
                    quality = evaluate_selector(q, k, v, one, causal=True)
                    found.setdefault(name, []).append(quality)
                    shape = f"{text}, layer {layer}"
                    _add(results, shape, length, ratio, name, [quality])
                gc.collect()
            print(f"\n{length} tokens, {ratio:g} left out\n{'':31}tiles  recall  error")
            for name, qualities in found.items():
                _add(results, "all", length, ratio, name, qualities)
                mean = _means(qualities)
                print(
                    f"{name:31}{mean['share of tiles']:.3f}   {mean['recall']:.3f}  "
                    f"{mean['error']:.3f}",
                    flush=True,
                )
            results.save()


def _means(qualities: list[Any]) -> dict[str, float]:
    def mean(name: str) -> float:
        return float(np.mean([getattr(one, name) for one in qualities]))

    return {
        "share of tiles": mean("share"),
        "recall": mean("recall"),
        "worst row": min(one.worst for one in qualities),
        "error": mean("error"),
    }


def _add(
    results: Results,
    shape: str,
    length: int,
    ratio: float,
    name: str,
    qualities: list[Any],
) -> None:
    case = f"{shape}, {length} tokens / {ratio:g} left out"
    for metric, value in _means(qualities).items():
        results.add(case, f"{OURS}, {name}", metric, value, "", show=False)


def read_sparsely(
    model: reading.Model, options: argparse.Namespace, results: Results
) -> None:
    """The whole model's loss, with the same selector in each layer."""
    count, ratio = max(options.lengths), options.ratios[0]
    rows = -(-count // SIDE)
    untrained = dict.fromkeys(("tiles", "pieces"), init_gate(1, 1, 1))
    for text in JUDGE:
        tokens = tokens_of(model, text, count)
        dense, _ = model.read(tokens)
        case = f"{text}, {count} tokens / {ratio:g} left out in every layer"
        results.add(case, f"{OURS}, dense", "loss", dense, "nats")
        for name, one in selectors(ratio, rows, untrained).items():
            if isinstance(one, LearnedGate):  # each layer would need its own
                continue

            def attend(i: int, q: Any, k: Any, v: Any, one: Any = one) -> jax.Array:
                return _attend(one, q, k, v)

            loss, _ = model.read(tokens, attend)
            results.add(case, f"{OURS}, {name}", "loss", loss, "nats")
            results.save()


@jax.jit
def _attend(selector: Selector, q: Any, k: Any, v: Any) -> jax.Array:
    return sparse_attention(q, k, v, selector, causal=True)


def bench(options: argparse.Namespace, results: Results) -> None:
    if options.activations:
        measured = Measured.load(options.activations)
    else:
        model = (
            reading.random_model() if options.quick else reading.smollm2(options.model)
        )
        measured = read(model, options, results)
    results.versions |= measured.sources
    if options.save_activations:
        measured.save(options.save_activations)
    judge(measured, options, results)
    if options.loss:
        read_sparsely(model, options, results)


def _sources(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """What the texts were, by the beginnings of their SHA-256."""
    for name in (*LEARN[: options.texts], *JUDGE):
        text = reading.text_of(name).encode()
        yield f"text {name}", hashlib.sha256(text).hexdigest()[:12]


def main() -> None:
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, help="the GGUF file, if it is here")
    source.add_argument("--activations", type=Path, help="of --save-activations")
    parser.add_argument("--save-activations", type=Path, metavar="FILE")
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    parser.add_argument("--lengths", type=int, nargs="*", default=(TOKENS, 4096))
    parser.add_argument("--ratios", type=float, nargs="*", default=RATIOS)
    parser.add_argument("--texts", type=int, default=len(LEARN), help="to learn from")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a gate's training")
    parser.add_argument("--loss", action="store_true", help="also the model's loss")
    options = parser.parse_args()
    if options.loss and options.activations:
        parser.error("--loss takes the model")
    if options.quick:
        options.lengths, options.ratios, options.layers = [1024], [0.75], [1]
        options.texts, options.steps = 1, 2
    outcome = common.run_bench("sparse-quality", bench, options)
    sys.exit(common.exit_status([outcome], options))


if __name__ == "__main__":
    main()
