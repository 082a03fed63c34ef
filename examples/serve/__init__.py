"""A server's loop on a real model: many requests, one pool of blocks, a jit a step.

`interface` says what requests, streams and engines are; `engine` is one. `models` reads
weights, `llama` is the forward pass over the pool.

    python examples/serve              # several prompts stream at once
    python examples/serve --random     # a tiny model, nothing to download
"""
