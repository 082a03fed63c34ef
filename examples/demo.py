"""One sequence's KV cache travels, and the model never notices.

SmolLM2-135M reads a story and a question. Its KV cache, kept in the blocks of an NHD
pool, is gathered to the universal layout, cut for three tensor-parallel ranks, merged
again in host memory and fetched into the blocks of an HND pool. From there the model
answers. A second run, whose cache never moved, must give the same text.

    python examples/demo.py
"""

import argparse
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import moves
import numpy as np
import speed
from smollm2.model import (
    Config,
    Params,
    decode_step,
    generate,
    prefill,
    store_prompt,
)
from smollm2.tokenizer import Tokenizer
from smollm2.weights import fetch, load_params, open_model

from jax_kvblock import BlockList, BlockManager

BLOCK_SIZE = 16
NUM_BLOCKS = 48
MAX_NEW_TOKENS = 48
# NumPy has no bfloat16, and the demo hands a layer to NumPy where torch is missing.
KV_DTYPE = jnp.float16
STARTED = time.perf_counter()


def say(message: str) -> None:
    """Print a progress line with the seconds since the start."""
    print(f"[{time.perf_counter() - STARTED:5.1f} s] {message}", flush=True)


def require(condition: bool, message: str) -> None:
    """Leave with exit code 1 and a message unless the condition holds."""
    if not condition:
        raise SystemExit(f"demo failed: {message}")


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def host_memory_kind() -> str:
    """Pinned host memory beside a GPU; on a CPU the device's memory is the host's."""
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    pinned = device.platform != "cpu" and "pinned_host" in kinds
    return "pinned_host" if pinned else "device"


def new_manager(
    config: Config, num_blocks: int, layout: str, memory_kind: str = "device"
) -> BlockManager:
    """A pool of blocks for the model's cache."""
    return BlockManager(
        config.num_layers,
        BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=KV_DTYPE,
        num_blocks=num_blocks,
        layout=layout,
        memory_kind=memory_kind,
    )


def same_bits(left: jax.Array, right: jax.Array) -> bool:
    """Whether two arrays of floats are equal bit for bit."""
    one, other = np.asarray(left), np.asarray(right)
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def hand_over(target: BlockManager, blocks: BlockList, host_blocks: BlockList) -> None:
    """Give a layer to torch by DLPack, or to NumPy where torch cannot take it."""
    on_gpu = jax.default_backend() != "cpu"
    if find_spec("torch"):
        import torch

        if not on_gpu or torch.cuda.is_available():
            tensor = torch.from_dlpack(blocks[0][0])
            base = target.pool.data.unsafe_buffer_pointer()
            offset = int(blocks.ids[0]) * (target.pool.nbytes // target.num_blocks)
            require(
                tensor.data_ptr() == base + offset,
                "torch was given a copy of the layer, not the layer",
            )
            say(
                f"torch sees layer 0 of block {blocks.ids[0]}, {tuple(tensor.shape)} "
                f"{tensor.dtype} on {tensor.device}, at the pool's own address: "
                f"mean {tensor.float().mean():+.4f}, std {tensor.float().std():.4f}"
            )
            return
        say("torch is installed without CUDA: NumPy takes the layer of the host pool")
    else:
        say("torch is not installed: NumPy takes the layer of the host pool")
    array = np.from_dlpack(host_blocks[0][0])
    wide = array.astype(np.float32)
    say(
        f"NumPy sees layer 0 of block {host_blocks.ids[0]}, {array.shape} "
        f"{array.dtype}: mean {wide.mean():+.4f}, std {wide.std():.4f}"
    )


def answer(
    config: Config,
    params: Params,
    tokenizer: Tokenizer,
    manager: BlockManager,
    blocks: BlockList,
    logits: jax.Array,
    num_tokens: int,
) -> str:
    """Decode greedily over the manager's blocks, print the text as it comes."""
    ids = jnp.asarray(blocks.ids)

    def step(token: jax.Array, position: jax.Array) -> jax.Array:
        logits, manager.pool = decode_step(
            config, params, token, position, manager.pool, ids
        )
        return logits

    tokens = generate(step, logits, num_tokens, MAX_NEW_TOKENS, tokenizer.end_of_turn)
    return print_text(tokenizer, tokens)


def print_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Print tokens as text while they come; return all of it."""
    seen: list[int] = []
    text = ""
    print("          ", end="", flush=True)
    for token in tokens:
        seen.append(token)
        longer = tokenizer.decode(seen)
        print(longer[len(text) :], end="", flush=True)
        text = longer
    print()
    return text


def main() -> None:
    """Run the demo; the exit code is 1 if anything came out differently."""
    # A GPU would round to TF32, coarse enough for two programs' ties to break apart.
    jax.config.update("jax_default_matmul_precision", "float32")
    say(f"running on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    path = fetch()
    say(f"reading {path.name}")
    config, reader = open_model(path)
    tokenizer = Tokenizer(reader)
    params = load_params(config, reader)
    size = sum(x.size for x in jax.tree.leaves(params)) / 1e6
    say(f"loaded SmolLM2-135M-Instruct, {size:.1f} M weights")

    text = Path(__file__).with_name("prompt.txt").read_text().strip()
    prompt = tokenizer.encode_chat(text)
    num_tokens = len(prompt)
    logits, k, v = prefill(config, params, jnp.asarray(prompt))
    source = new_manager(config, NUM_BLOCKS, "NHD")
    blocks = source.allocate_blocks(blocks_for(num_tokens + MAX_NEW_TOKENS))
    source.pool = store_prompt(source.pool, jnp.asarray(blocks.ids), k, v)
    # Only the prompt's blocks travel; the others wait for the answer's tokens.
    num_moved = blocks_for(num_tokens)
    source_ids = jnp.asarray(blocks.ids[:num_moved])
    say(f"prefilled {num_tokens} tokens; their KV fills {num_moved} blocks (NHD)")

    universal = moves.to_universal(source.pool, source_ids)
    say(f"gathered the blocks to universal: {universal.dtype}{list(universal.shape)}")
    slices = moves.cut_heads(source.pool, source_ids)
    require(
        same_bits(jnp.concatenate(slices, axis=1), universal),
        "the three ranks' slices together are not the universal blocks",
    )
    say(f"cut them for {len(slices)} ranks: {list(slices[0].shape)} each")

    memory_kind = host_memory_kind()
    host = new_manager(config, num_moved, "HND", memory_kind)
    host_blocks = host.allocate_blocks(num_moved)
    host_ids = jnp.asarray(host_blocks.ids)
    host.pool = moves.merge_heads(host.pool, host_ids, slices)
    place = "pinned host memory" if memory_kind != "device" else "host memory"
    say(f"merged the slices in the HND blocks of a pool in {place}")

    target = new_manager(config, NUM_BLOCKS, "HND")
    # Blocks of somebody else come first, so that ours have other ids than at home.
    others = target.allocate_blocks(7)
    moved = target.allocate_blocks(len(blocks))
    target_ids = jnp.asarray(moved.ids[:num_moved])
    target.pool = moves.fetch_blocks(target.pool, target_ids, host.pool, host_ids)
    require(
        same_bits(moves.to_universal(target.pool, target_ids), universal),
        "the moved blocks differ from those that stayed",
    )
    say("fetched them into another HND pool; every bit arrived")
    hand_over(target, moved, host_blocks)

    model = (config, params, tokenizer)
    say("the answer from the moved cache:")
    moved_text = answer(*model, target, moved, logits, num_tokens)
    say("the answer from the cache that never moved:")
    text = answer(*model, source, blocks, logits, num_tokens)
    require(
        moved_text == text,
        f"the moved cache gave another text:\n{moved_text!r}\ninstead of\n{text!r}",
    )
    say("the same text, token for token; now the speed of each move")

    places = (
        speed.Place(source.pool, source_ids),
        speed.Place(host.pool, host_ids),
        speed.Place(target.pool, target_ids),
    )
    print()
    speed.print_table(speed.time_moves(*places, k, v))
    print()
    for manager, taken in ((source, blocks), (host, host_blocks), (target, moved)):
        manager.free(taken)
    target.free(others)
    say("done")


if __name__ == "__main__":
    # It has no options; --help says so before 93 MB are fetched.
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
