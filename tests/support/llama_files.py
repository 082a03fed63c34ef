"""Tiny models of the Llama family: their weights, as files, and their logits in NumPy.

The weights are drawn here, by the names of Hugging Face's transformers. A folder and a
GGUF file are written from them, and `dense_logits` computes in float64 from the same
numbers: nothing of the examples' own code has a part in what is right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = str(Path(__file__).parents[2] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)

MERGES = ["t h", "th e", "i n", "e r", "a n", "o n", "Ġ the", "Ġ a"]
SPECIAL = ["<s>", "</s>", "<|turn|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}<|turn|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}{% endfor %}{% if add_generation_prompt %}"
    "<|turn|>assistant\n{% endif %}"
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {"rope_scaling": LLAMA3},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}, "head_dim": 8},
    "qwen2": {"model_type": "qwen2", "biases": ("q", "k", "v")},
    "qwen3": {"model_type": "qwen3", "head_norms": True, "num_key_value_heads": 4},
}


@dataclass
class TinyModel:
    """Weights and what shapes them."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def draw(cls, kind: str = "llama", seed: int = 0, **sizes: int) -> TinyModel:
        options = dict(KINDS[kind])
        biases, norms = options.pop("biases", ()), options.pop("head_norms", False)
        vocabulary = 256 + len(MERGES) + len(SPECIAL)
        config: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": vocabulary,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 3000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "eos_token_id": vocabulary - 2,
            **options,
            **sizes,
        }
        self, random = cls(config), np.random.default_rng(seed)
        width, inner = config["hidden_size"], config["intermediate_size"]
        heads, kv_heads, dim = self.extents

        def put(name: str, *shape: int, scale: float, about: float = 0.0) -> None:
            drawn = about + scale * random.standard_normal(shape)
            self.tensors[name] = drawn.astype(np.float32)

        def layer(i: int) -> None:
            before = f"model.layers.{i}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                put(f"{before}{name}.weight", width, scale=0.1, about=1)
            for name, outputs, inputs in (
                ("self_attn.q_proj", heads * dim, width),
                ("self_attn.k_proj", kv_heads * dim, width),
                ("self_attn.v_proj", kv_heads * dim, width),
                ("self_attn.o_proj", width, heads * dim),
                ("mlp.gate_proj", inner, width),
                ("mlp.up_proj", inner, width),
                ("mlp.down_proj", width, inner),
            ):
                scale = 2 * inputs**-0.5
                put(f"{before}{name}.weight", outputs, inputs, scale=scale)
                if name[10:11] in biases:
                    put(f"{before}{name}.bias", outputs, scale=0.5)
            for name in ("q_norm", "k_norm") if norms else ():
                put(f"{before}self_attn.{name}.weight", dim, scale=0.2, about=1)

        put("model.embed_tokens.weight", vocabulary, width, scale=0.1)
        for i in range(config["num_hidden_layers"]):
            layer(i)
        put("model.norm.weight", width, scale=0.1, about=1)
        if not config["tie_word_embeddings"]:
            put("lm_head.weight", vocabulary, width, scale=0.3)
        return self

    @property
    def extents(self) -> tuple[int, int, int]:
        """Heads, KV heads, head dim."""
        c = self.config
        return c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

    # ---- as files ----

    def write_folder(self, path: Path, dtype: Any = np.float32) -> Path:
        """As Hugging Face's transformers write it, in two files of weights."""
        from safetensors.numpy import save_file

        path.mkdir()
        (path / "config.json").write_text(json.dumps(self.config))
        names = sorted(self.tensors)
        for i, part in enumerate((names[::2], names[1::2])):
            chosen = {name: self.tensors[name].astype(dtype) for name in part}
            save_file(chosen, path / f"model-{i}.safetensors")
        tokenizer().save(str(path / "tokenizer.json"))
        about = {
            "chat_template": TEMPLATE,
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
        }
        (path / "tokenizer_config.json").write_text(json.dumps(about))
        return path

    def write_gguf(
        self, path: Path, quantized: Callable[[str], Any] = lambda name: None
    ) -> Path:
        """As llama.cpp's converter writes it: rows of Llama's Q and K are permuted.

        quantized: of each tensor's name, its quantization of `gguf`; None for float32.
        """
        import gguf

        c, kind = self.config, self.config["model_type"]
        heads, kv_heads, dim = self.extents
        writer = gguf.GGUFWriter(path, kind)
        writer.add_block_count(c["num_hidden_layers"])
        writer.add_context_length(c["max_position_embeddings"])
        writer.add_embedding_length(c["hidden_size"])
        writer.add_feed_forward_length(c["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(dim)
        writer.add_value_length(dim)
        writer.add_rope_dimension_count(dim)
        writer.add_rope_freq_base(c["rope_theta"])
        writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
        scaling = c.get("rope_scaling") or {}
        if scaling.get("type") == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling["factor"])
        write_tokens(writer)
        for name, tensor in self.tensors.items():
            kept = tensor
            if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                rows = tensor.reshape(-1, 2, dim // 2, tensor.shape[-1])
                kept = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(tensor.shape)
            if (form := quantized(name)) is not None:
                kept = gguf.quants.quantize(kept, form)
            writer.add_tensor(gguf_name(name), kept, raw_dtype=form)
        if scaling.get("rope_type") == "llama3":
            slower = frequencies(c | {"rope_scaling": None}) / frequencies(c)
            writer.add_tensor("rope_freqs.weight", slower.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    part, _, kind = name.rpartition(".")
    if not part.startswith("model.layers."):
        return f"{GGUF_NAMES[part]}.{kind}"
    _, _, layer, part = part.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def vocabulary() -> list[str]:
    """Bytes as GPT-2 spells them, what they merge to, special tokens."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]


def tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {text: index for index, text in enumerate(vocabulary())}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return made


def write_tokens(writer: Any) -> None:
    """The same tokenizer, as GGUF has it."""
    import gguf

    texts, special = vocabulary(), len(SPECIAL)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    kinds = [normal] * (len(texts) - special) + [control] * special
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(len(texts) - 3)
    writer.add_eos_token_id(len(texts) - 2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


# ---- the truth -----------------------------------------------------------------------


def frequencies(config: dict[str, Any]) -> np.ndarray:
    """Of the rotation; slow ones are slower yet in Llama 3.1 (its own code)."""
    dim = config["head_dim"]
    plain = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("type") == "linear":
        return plain / scaling["factor"]
    if not scaling:
        return plain
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * np.pi / plain
    smooth = (old / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    slow, quick = wavelength > old / low, wavelength < old / high
    return np.where(slow, plain / factor, np.where(quick, plain, between))


def dense_logits(model: TinyModel, tokens: Any) -> np.ndarray:
    """Logits behind each token, float64 [T, vocabulary], by attention over all."""
    c, w = model.config, {k: v.astype(np.float64) for k, v in model.tensors.items()}
    heads, kv_heads, dim = model.extents
    x = w["model.embed_tokens.weight"][np.asarray(tokens)]
    length = len(x)
    angle = np.arange(length)[:, None, None] * frequencies(c)
    future = np.triu(np.ones((length, length), bool), 1)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"])
        return x / size * w[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def turned(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, -1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = norm(x, f"{at}input_layernorm")
        q, k, v = (
            linear(h, f"{at}self_attn.{name}_proj").reshape(length, -1, dim)
            for name in "qkv"
        )
        if f"{at}self_attn.q_norm.weight" in w:
            q = norm(q, f"{at}self_attn.q_norm")
            k = norm(k, f"{at}self_attn.k_norm")
        q, k = turned(q), turned(k)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores = np.where(future, -np.inf, scores)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", chances, v).reshape(length, -1)
        x = x + linear(mixed, f"{at}self_attn.o_proj")
        h = norm(x, f"{at}post_attention_layernorm")
        gate, up = linear(h, f"{at}mlp.gate_proj"), linear(h, f"{at}mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{at}mlp.down_proj")
    x = norm(x, "model.norm")
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
