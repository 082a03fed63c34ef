"""SmolLM2-135M-Instruct in plain JAX, with its KV cache in blocks.

`weights` fetches the model file, `tokenizer` turns text into ids and back, `model` is
the Llama forward pass: `prefill` for a prompt, `decode_step` for one more token.
`tiny` has a model of the same shape that needs no file.
"""
