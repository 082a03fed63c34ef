"""A small model that looks facts up in a long text, with all tiles and with a tenth.

The text is filler with facts in it, a key and its value; behind it come questions, keys
whose values the model has to say. It is trained with dense attention. Then each
selector in turn chooses the tiles that every layer visits, all with the same budget,
and a line says what came of it: among the questions the share of tiles, the recall of
attention's mass and the error of attention's output (means over layers), and how many
answers are right.

    python examples/sparse_retrieval.py            # sized for what there is to run on
    python examples/sparse_retrieval.py --cpu      # a few minutes on two cores
    python examples/sparse_retrieval.py --quick    # a minute, and it learns less

With `--out DIR` the lines of all seeds go to a record like those of the benchmarks,
`DIR/<device>/sparse-retrieval-<date>.json`. Gates are trained with optax (`pip install
optax`).
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_kvblock import flash_attention
from jax_kvblock.sparse import (
    AntidiagonalThreshold,
    BlockSparse,
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
    train_gate,
)

Params = dict[str, Any]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model, the text, and the training. Tokens are filler, keys, then values."""

    layers: int = 2
    heads: int = 2
    head_dim: int = 64
    fillers: int = 64
    keys: int = 512
    values: int = 64
    fact: int = 8  # tokens of a fact: its key and value again and again
    tokens: int = 2048  # of a text that is asked about
    block: int = 32  # the side of a tile
    piece: int = 8  # and of the pieces of it that a gate knows
    short: int = 512  # tokens of a text to learn from
    steps: int = 600
    batch: int = 16
    gate_steps: int = 300
    texts: int = 32  # that are asked about
    dtype: Any = jnp.float32

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def vocabulary(self) -> int:
        return self.fillers + self.keys + self.values


CPU = Sizes()
QUICK = Sizes(
    keys=128,
    tokens=512,
    block=16,
    piece=8,
    short=256,
    steps=170,
    batch=12,
    gate_steps=40,
    texts=12,
)
# The same in tiles that the CUDA kernels take.
GPU = Sizes(
    keys=4096,
    tokens=16384,
    block=128,
    piece=32,
    short=2048,
    steps=3000,
    batch=32,
    gate_steps=600,
    fact=32,
    dtype=jnp.bfloat16,
)


# ---- the texts -----------------------------------------------------------------------


def draw_texts(
    sizes: Sizes,
    rng: np.random.Generator,
    count: int,
    tokens: int,
    question: int,
    asked_part: int = 8,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and answers, both [count, tokens]; an answer of −1 is not asked for.

    The last of so many parts of a text is questions, of `question` tokens each. Where
    one fills a tile, the tile's queries look in one place, as those of a prompt do.
    """
    slots, asked = tokens // sizes.fact, tokens // asked_part // sizes.fact
    text = rng.integers(0, sizes.fillers, (count, slots, sizes.fact))
    answers = np.full((count, slots, sizes.fact), -1)
    every = slots - asked
    facts = min(every // 4, sizes.keys)
    of_a_question = max(1, question // sizes.fact)
    for row, answer in zip(text, answers, strict=True):
        keys = rng.permutation(sizes.keys)[:facts]
        values = rng.integers(0, sizes.values, facts)
        places = rng.permutation(every)[:facts]
        row[places, 0::2] = sizes.fillers + keys[:, None]
        row[places, 1::2] = sizes.fillers + sizes.keys + values[:, None]
        # Nothing is asked twice, as long as there are facts.
        chosen = np.resize(rng.permutation(facts), asked // of_a_question + 1)
        chosen = chosen[np.arange(asked) // of_a_question]
        row[every:] = sizes.fillers + keys[chosen, None]
        answer[every:] = values[chosen, None]
    return text.reshape(count, tokens), answers.reshape(count, tokens)


# ---- the model -----------------------------------------------------------------------


def init(sizes: Sizes, key: jax.Array) -> Params:
    keys = iter(jax.random.split(key, 6))
    width, layers = sizes.width, sizes.layers

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])

    return {
        "token": jax.random.normal(next(keys), (sizes.vocabulary, width // 2)),
        "qkv": draw(layers, width, 3 * width),
        "out": draw(layers, width, width) / layers,
        "norm": jnp.ones((layers + 1, width)),
        "head": draw(width, sizes.values),
    }


def normalize(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def logits(
    sizes: Sizes, params: Params, text: jax.Array, attend: Attend
) -> tuple[jax.Array, list[tuple[jax.Array, ...]]]:
    """Scores of values [B, T, values], and the (q, k, v) of each layer.

    A position knows its own token and the one before it; where they are in the text, it
    does not: so a model that learned from short texts reads long ones.
    """
    before = jnp.pad(text, ((0, 0), (1, 0)))[:, :-1]
    x = jnp.concatenate([params["token"][text], params["token"][before]], -1)
    seen = []
    for i in range(sizes.layers):
        h = normalize(x, params["norm"][i])
        shape = (*text.shape, 3, sizes.heads, sizes.head_dim)
        qkv = (h @ params["qkv"][i]).reshape(shape).astype(sizes.dtype)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        seen.append((q, k, v))
        o = attend(i, q, k, v).astype(x.dtype).reshape(x.shape)
        x = x + o @ params["out"][i]
    return normalize(x, params["norm"][-1]) @ params["head"], seen


def dense(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return flash_attention(q, k, v, causal=True)


def loss(
    sizes: Sizes, params: Params, text: jax.Array, answers: jax.Array
) -> jax.Array:
    scores = jax.nn.log_softmax(logits(sizes, params, text, dense)[0])
    asked = answers >= 0
    picked = jnp.take_along_axis(scores, jnp.maximum(answers, 0)[..., None], -1)
    return -jnp.sum(picked[..., 0] * asked) / jnp.sum(asked)


def train(sizes: Sizes, seed: int) -> Params:
    """The model, which has learned to look up."""
    rng = np.random.default_rng(seed)
    params = init(sizes, jax.random.key(seed))
    rate = optax.warmup_cosine_decay_schedule(0, 3e-3, sizes.steps // 10, sizes.steps)
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, text: Any, answers: Any) -> Any:
        value, slopes = jax.value_and_grad(loss, argnums=1)(
            sizes, params, text, answers
        )
        changes, state = rule.update(slopes, state)
        return optax.apply_updates(params, changes), state, value

    state, start = rule.init(params), time.perf_counter()
    for i in range(sizes.steps):
        batch = draw_texts(sizes, rng, sizes.batch, sizes.short, sizes.fact)
        params, state, value = step(params, state, *batch)
        if i % max(1, sizes.steps // 10) == 0 or i == sizes.steps - 1:
            spent = time.perf_counter() - start
            print(f"step {i:4}: {float(value):.4f} nats, {spent:.0f} s", flush=True)
    return params


# ---- the selectors -------------------------------------------------------------------


def layers_of(sizes: Sizes, params: Params) -> Any:
    """A compiled function: the (q, k, v) of each layer for texts."""
    return jax.jit(lambda text: logits(sizes, params, text, dense)[1])


def trained_gates(sizes: Sizes, params: Params, seed: int) -> list[Any]:
    """A gate for each layer, which has seen other texts than those that are asked."""
    seen = layers_of(sizes, params)

    def batches(layer: int) -> Iterator[tuple[jax.Array, jax.Array]]:
        rng = np.random.default_rng(seed)
        for _ in range(sizes.gate_steps):
            # A quarter is questions: a gate learns from the rows that look somewhere.
            text, _ = draw_texts(sizes, rng, 4, sizes.tokens, sizes.block, 4)
            yield seen(text)[layer][:2]

    gates = []
    for layer in range(sizes.layers):
        gate, losses = train_gate(
            init_gate(sizes.heads, sizes.heads, sizes.head_dim),
            batches(layer),
            optax.adam(1e-3),
            block_q=sizes.piece,
            block_kv=sizes.piece,
            causal=True,
        )
        print(f"gate of layer {layer}: {losses[0]:.3f} to {losses[-1]:.3f} nats")
        gates.append(gate)
    return gates


def selectors(sizes: Sizes, ratio: float, gates: list[Any]) -> dict[str, list[Any]]:
    """Each pattern's selectors, one for each layer, with one budget."""
    tiles = {"block_q": sizes.block, "block_kv": sizes.block}
    budget = {"sparsity_ratio": ratio, **tiles}
    scored = {"tau": None, "sinks": 0, **budget}
    rows = -(-sizes.tokens // sizes.block)
    # As many tiles as the others have among the questions, which come last.
    window = max(1, round((1 - ratio) * rows * 15 / 16) - 1)
    shared: dict[str, Selector] = {
        "random": Random(**budget),
        "block sparse": BlockSparse(run=2, **budget),
        "strided": Strided(**budget),
        "local + global": LocalGlobal(num_global=2, **budget),
        "streaming": Streaming(sinks=1, window=window, **tiles),
        "threshold": AntidiagonalThreshold(stride=8, **scored),
        "pooled": PooledThreshold(piece=sizes.piece, **scored),
    }
    made = {name: [one] * sizes.layers for name, one in shared.items()}
    made["learned"] = [LearnedGate(gate, piece=sizes.piece, **scored) for gate in gates]
    made["oracle"] = [Oracle(**scored)] * sizes.layers
    return made


@dataclasses.dataclass
class Line:
    """What came of one pattern."""

    pattern: str
    share: float
    recall: float
    error: float
    right: float


def ask(
    sizes: Sizes, params: Params, attend: Attend, texts: np.ndarray, answers: np.ndarray
) -> float:
    """The share of questions that are answered right, at their last token."""
    answer = jax.jit(lambda text: logits(sizes, params, text, attend)[0].argmax(-1))
    said = np.concatenate([np.asarray(answer(text[None])) for text in texts])
    last = slice(sizes.tokens * 7 // 8 + sizes.block - 1, None, sizes.block)
    return float((said[:, last] == answers[:, last]).mean())


def compare(
    sizes: Sizes, params: Params, gates: list[Any], ratio: float, seed: int
) -> list[Line]:
    rng = np.random.default_rng(seed)
    texts, answers = draw_texts(sizes, rng, sizes.texts, sizes.tokens, sizes.block)
    lines = [Line("dense", 1, 1, 0, ask(sizes, params, dense, texts, answers))]
    # Recall and error are those of the questions' part, the last eighth.
    layers, first = layers_of(sizes, params)(texts[:2]), sizes.tokens * 7 // 8
    for name, made in selectors(sizes, ratio, gates).items():

        def attend(i: int, q: Any, k: Any, v: Any, made: Any = made) -> jax.Array:
            return sparse_attention(q, k, v, made[i], causal=True)

        found = [
            evaluate_selector(q[:, first:], k, v, one, causal=True, q_offset=first)
            for (q, k, v), one in zip(layers, made, strict=True)
        ]
        lines.append(
            Line(
                name,
                float(np.mean([one.share for one in found])),
                float(np.mean([one.recall for one in found])),
                float(np.mean([one.error for one in found])),
                ask(sizes, params, attend, texts, answers),
            )
        )
    return lines


def record(
    sizes: Sizes, lines: dict[int, list[Line]], out: Path, commit: str | None
) -> Path:
    """Writes the lines of each seed as benchmarks write theirs."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
    from support import common

    results = common.Results()
    for seed, of_seed in lines.items():
        case = f"{sizes.tokens} tokens, tiles of {sizes.block}, seed {seed} / questions"
        for line in of_seed:
            who = f"{common.OURS}, {line.pattern}"
            for metric, value in (
                ("share of tiles", line.share),
                ("recall", line.recall),
                ("error", line.error),
                ("right answers", line.right),
            ):
                results.add(case, who, metric, value, "", show=False)
    document = results.document(argparse.Namespace(commit=commit))
    return common.write(document, "sparse-retrieval", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="what two cores can do")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny task, less learned"
    )
    parser.add_argument("--ratio", type=float, default=0.9, help="tiles left out")
    parser.add_argument("--piece", type=int, help="the side of the gates' pieces")
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0], help="a model for each"
    )
    parser.add_argument("--out", type=Path, default=None, help="where a record goes")
    parser.add_argument("--commit", help="the record's, where git is not at hand")
    options = parser.parse_args()
    if options.cpu:
        jax.config.update("jax_platforms", "cpu")
    sizes = GPU if jax.default_backend() == "gpu" else CPU
    sizes = QUICK if options.quick else CPU if options.cpu else sizes
    if options.piece:
        sizes = dataclasses.replace(sizes, piece=options.piece)

    print(
        f"texts of {sizes.tokens:,} tokens in tiles of {sizes.block}, {sizes.layers} "
        f"layers of {sizes.heads} heads of {sizes.head_dim}, {sizes.dtype.__name__}, "
        f"on {jax.devices()[0].device_kind}"
    )
    lines = {}
    for seed in options.seed:
        params = train(sizes, seed)
        gates = trained_gates(sizes, params, seed + 1)
        lines[seed] = compare(sizes, params, gates, options.ratio, seed + 2)
        print(f"seed {seed}\n{'pattern':>14}  tiles  recall  error  right")
        for line in lines[seed]:
            print(
                f"{line.pattern:>14}  {line.share:5.3f}   {line.recall:5.3f}  "
                f"{line.error:5.3f}  {line.right:5.3f}"
            )
    if options.out:
        print(f"wrote {record(sizes, lines, options.out, options.commit)}")


if __name__ == "__main__":
    main()
