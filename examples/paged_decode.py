"""Sequences of all lengths share one pool of blocks, and one call a step serves them.

SmolLM2-135M answers eight questions, four at a time. A step takes the next tokens of
all that run: one row of those that decode, a chunk of those that still read. It writes
their keys and values into the blocks of the pool (`append_kv`) and attends through the
block tables (`paged_attention`). Tokens, tables and lengths are operands: sequences
come, grow and go, and nothing is compiled again. At the end the same model runs over
each text with dense attention, and must choose every token again.

    python examples/paged_decode.py             # downloads the model once, 93 MB
    python examples/paged_decode.py --random    # a tiny model with random weights
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scheduler import Batch, Scheduler, Sequence
from smollm2 import tiny
from smollm2.model import Config, Params, finish_layer, project_qkv, read_logits

from jax_kvblock import BlockManager, KVPool, append_kv, paged_attention

BLOCK_SIZE = 16
PLACES = 4  # sequences that run at the same time
ROWS = 64  # tokens of a step that reads prompts
MOST_NEW = 32

QUESTIONS = {
    "France": "What is the capital of France?",
    "colors": "Name three colors.",
    "the sea": "Write one sentence about the sea, with a ship and a storm in it.",
    "a story": Path(__file__).with_name("prompt.txt").read_text().strip(),
    "2 + 3": "What is 2 + 3?",
    "the sky": "Why is the sky blue? Answer in one sentence.",
    "a walk": "Make a short list of things to take along on a walk in the mountains.",
    "Spanish": "Say hello in Spanish.",
}


class Model(NamedTuple):
    """A model, and what it is asked."""

    config: Config
    params: Params
    sequences: list[Sequence]
    num_blocks: int  # too few for all: some have to wait
    end: int
    decode: Callable[[list[int]], str]


def require(condition: bool, message: str) -> None:
    """Leave with exit code 1 and a message unless the condition holds."""
    if not condition:
        raise SystemExit(f"paged_decode failed: {message}")


# ---- the model over a pool -----------------------------------------------------------

traced: list[int] = []  # the rows of every program that was made


@partial(jax.jit, static_argnums=0, donate_argnames="pool")
def step(
    config: Config, params: Params, batch: Batch, pool: KVPool
) -> tuple[jax.Array, KVPool]:
    """Run the rows of a batch through the model.

    Returns:
        The likeliest token behind each sequence's last row, int32[places], and the pool
        with the keys and values of these rows, in place.
    """
    traced.append(len(batch.tokens))  # Python runs this when JAX traces, not later

    def layer(carry: tuple, weights_at: tuple) -> tuple[tuple, None]:
        (x, pool), (index, weights) = carry, weights_at
        q, k, v = project_qkv(config, weights, x, batch.positions)
        pool = append_kv(pool, index, k, v, batch.slots)
        attended = paged_attention(
            q, pool, index, batch.tables, batch.kv_lens, query_start=batch.query_start
        )
        return (finish_layer(config, weights, x, attended), pool), None

    start = (params["embedding"][batch.tokens], pool)
    layers = (jnp.arange(config.num_layers), params["layers"])
    (x, pool), _ = jax.lax.scan(layer, start, layers)
    last = x[batch.query_start[1:] - 1]
    return jnp.argmax(read_logits(config, params, last), axis=-1), pool


# ---- the same model over one dense text ----------------------------------------------


@partial(jax.jit, static_argnums=0)
def dense_choices(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """The likeliest token behind each of `tokens` [T]: attention of `jax.nn`."""
    positions = jnp.arange(len(tokens))

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        q, k, v = project_qkv(config, weights, x, positions)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return finish_layer(config, weights, x, attended), None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    return jnp.argmax(read_logits(config, params, x), axis=-1)


def check_against_dense(model: Model) -> int:
    """Every new token is the one that dense attention chooses; returns how many.

    Given the tokens before it, so that one pass over a text checks all of its tokens.
    """
    for sequence in model.sequences:
        tokens = sequence.tokens
        padded = np.zeros(-(-len(tokens) // 128) * 128, np.int32)  # few lengths
        padded[: len(tokens)] = tokens
        choices = np.asarray(dense_choices(model.config, model.params, padded))
        wanted = choices[sequence.num_prompt - 1 : len(tokens) - 1].tolist()
        require(
            sequence.new_tokens == wanted,
            f"{sequence.name}: dense attention chooses\n{wanted} instead of\n"
            f"{sequence.new_tokens}",
        )
    return sum(len(sequence.new_tokens) for sequence in model.sequences)


# ---- what is run ---------------------------------------------------------------------


def random_model() -> Model:
    """A tiny model, and prompts of random tokens: a single one, whole blocks, ..."""
    random = np.random.default_rng(0)
    lengths = (
        (5, 20),
        (90, 12),
        (16, 33),
        (1, 24),
        (64, 3),
        (131, 16),
        (33, 30),
        (9, 1),
    )
    sequences = [
        Sequence(f"prompt of {n}", random.integers(tiny.VOCABULARY, size=n).tolist(), m)
        for n, m in lengths
    ]
    return Model(tiny.CONFIG, tiny.random_params(), sequences, 14, -1, str)


def real_model() -> Model:
    """SmolLM2, and questions to it."""
    for package in ("gguf", "tokenizers"):
        require(
            find_spec(package) is not None,
            f"{package} is not installed; pip install -r examples/requirements.txt, or "
            "run with --random, which needs no model",
        )
    from smollm2.tokenizer import Tokenizer
    from smollm2.weights import fetch, load_params, open_model

    try:
        path = fetch()
    except RuntimeError as error:
        raise SystemExit(f"{error}; --random needs no model") from error
    config, reader = open_model(path)
    tokenizer = Tokenizer(reader)
    sequences = [
        Sequence(name, tokenizer.encode_chat(text), MOST_NEW)
        for name, text in QUESTIONS.items()
    ]
    params = load_params(config, reader)
    end = tokenizer.end_of_turn
    return Model(config, params, sequences, 40, end, tokenizer.decode)


@dataclass
class Account:
    """What happened in a run; time is that of the steps that compiled nothing."""

    steps: int = 0
    seconds: float = 0.0
    rows: int = 0
    new_tokens: int = 0
    most_blocks: int = 0
    put_back: int = 0


def serve(model: Model) -> Account:
    """Run steps until all sequences have ended."""
    config = model.config
    manager = BlockManager(
        config.num_layers,
        BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.float32,
        num_blocks=model.num_blocks,
    )
    address = manager.pool.data.unsafe_buffer_pointer()
    longest = max(s.num_prompt + s.most_new for s in model.sequences)
    scheduler = Scheduler(manager, PLACES, ROWS, -(-longest // BLOCK_SIZE), model.end)
    for sequence in model.sequences:
        scheduler.add(sequence)
    account = Account()
    while (batch := scheduler.next_batch()) is not None:
        for sequence in model.sequences:
            sequence.history += sequence.letter
        in_use = manager.num_blocks - manager.num_free_blocks
        account.most_blocks = max(account.most_blocks, in_use)
        programs, began = len(traced), time.perf_counter()
        chosen, manager.pool = step(config, model.params, batch, manager.pool)
        num_new = scheduler.take(np.asarray(chosen))
        if programs == len(traced):
            account.steps += 1
            account.seconds += time.perf_counter() - began
            account.rows += int(batch.query_start[-1])
            account.new_tokens += num_new
    account.put_back = scheduler.num_put_back
    require(manager.num_free_blocks == manager.num_blocks, "blocks were lost")
    moved = manager.pool.data.unsafe_buffer_pointer() != address
    require(not moved, "the pool was copied instead of updated in place")
    return account


def show(model: Model, account: Account) -> None:
    """Print the answers, who did what in which step, and the account."""
    print("\nanswers")
    for sequence in model.sequences:
        text = " ".join(model.decode(sequence.new_tokens).split())
        print(f"  {sequence.name:13} {text[:72]}")
    print("\nsteps, a column each: R reads its prompt, d decodes, . waits")
    for sequence in model.sequences:
        print(f"  {sequence.name:13} {sequence.history.rstrip()}")
    rate, new = (n / account.seconds for n in (account.rows, account.new_tokens))
    lines = {
        "speed": f"{rate:.0f} tokens/s, {new:.0f} of them new: {account.steps} steps "
        f"in {account.seconds:.2f} s, and {len(traced)} that compiled",
        "blocks": f"{account.most_blocks} of {model.num_blocks} in use at most, none "
        f"at the end; put back for want of blocks: {account.put_back} times",
        "traces": f"{len(traced)}, for {' and '.join(map(str, traced))} rows",
    }
    print()
    for name, text in lines.items():
        print(f"{name:15} {text}")


def main() -> None:
    """Run; the exit code is 1 if any token is another than with dense attention."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", action="store_true", help="a tiny random model")
    options = parser.parse_args()
    # A GPU would round to TF32, coarse enough for two programs' ties to break apart.
    jax.config.update("jax_default_matmul_precision", "float32")
    print(f"running on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    model = random_model() if options.random else real_model()
    show(model, serve(model))
    require(sorted(traced) == [PLACES, ROWS], f"programs were made for {traced} rows")
    num_tokens = check_against_dense(model)
    print(f"{'dense':15} attention in float32 chooses the same {num_tokens} tokens")


if __name__ == "__main__":
    main()
