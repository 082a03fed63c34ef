"""What shapes a model of the Llama family, read from `config.json` or a GGUF file."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# The names in `config.json` and in GGUF files. They differ in what a layer adds to
# Llama's, biases and norms of queries and keys, which is seen from the weights.
FAMILY = ("llama", "mistral", "qwen2", "qwen3")

# Of `Config`: numbers from 1 on.
WHOLE = (
    "num_layers",
    "width",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_tokens",
)
NEEDED = (  # in `config.json`
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)


class UnknownModelError(ValueError):
    """The model is none that is served here; the message says why."""


@dataclass(frozen=True)
class Config:
    """What shapes the model. Frozen, hence hashable, hence static under jit.

    Attributes:
        inv_freq: the frequencies of the rotary embedding, head_dim / 2, scaled.
        interleaved: the two coordinates of a rotation are neighbours, as GGUF files of
            Llama have them, or half a head apart.
        max_tokens: of a text, which the model was trained for.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    inv_freq: tuple[float, ...]
    interleaved: bool
    max_tokens: int

    def __post_init__(self) -> None:
        for name in WHOLE:
            _whole(name, getattr(self, name))
        _real("norm_eps", self.norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise UnknownModelError(
                f"{self.num_heads} heads are no multiple of {self.num_kv_heads} KV "
                "heads"
            )


def of_hub(given: Mapping[str, Any]) -> Config:
    """From the `config.json` of a folder, as Hugging Face's transformers write it.

    Raises:
        UnknownModelError: for another architecture, or an option that is not served.
    """
    kind = given.get("model_type")
    if kind not in FAMILY:
        raise _unknown("model_type", kind)
    for name in NEEDED:
        if not isinstance(given.get(name), int | float):
            raise UnknownModelError(f"config.json: {name} is missing, or no number")
    _require("hidden_act", given.get("hidden_act", "silu"), "silu")
    _require("quantization_config", given.get("quantization_config"), None)
    heads = _whole("num_attention_heads", given["num_attention_heads"])
    dim = _whole("head_dim", given.get("head_dim") or given["hidden_size"] // heads)
    # Newer files have all that concerns the rotation under one name.
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        told = given.get(name) or {}
        if not isinstance(told, Mapping):
            raise UnknownModelError(f"{name} must be an object, got {told!r}")
        rope |= told
    _require("partial_rotary_factor", given.get("partial_rotary_factor", 1), 1)
    _require("partial_rotary_factor", rope.get("partial_rotary_factor", 1), 1)
    theta = _real("rope_theta", rope.get("rope_theta", given.get("rope_theta", 1e4)))
    longest = given["max_position_embeddings"]
    window = given.get("sliding_window")
    if window is not None and given.get("use_sliding_window", True):
        # Where a window sees as much as no window.
        longest = min(longest, _whole("sliding_window", window))
    return Config(
        num_layers=given["num_hidden_layers"],
        width=given["hidden_size"],
        num_heads=heads,
        num_kv_heads=given.get("num_key_value_heads") or heads,
        head_dim=dim,
        vocab_size=given["vocab_size"],
        norm_eps=given["rms_norm_eps"],
        inv_freq=_scaled(frequencies(theta, dim), rope),
        interleaved=False,
        max_tokens=longest,
    )


def of_gguf(field: Callable[..., Any], divisors: Any) -> Config:
    """From the fields of a GGUF file.

    Args:
        field: (name, default) -> its value; without a default it must be there.
        divisors: the tensor `rope_freqs`, head_dim / 2; None where there is none.

    Raises:
        UnknownModelError: for another architecture, or an option that is not served.
    """
    kind = field("general.architecture")
    if kind not in FAMILY:
        raise _unknown("general.architecture", kind)

    def own(name: str, *default: Any) -> Any:
        return field(f"{kind}.{name}", *default)

    heads = _whole("attention.head_count", own("attention.head_count"))
    width = _whole("embedding_length", own("embedding_length"))
    kv_heads = own("attention.head_count_kv", heads)
    if not isinstance(kv_heads, int):
        raise UnknownModelError(
            f"head_count_kv differs from layer to layer: {kv_heads}"
        )
    dim = own("attention.key_length", width // heads)
    _require("attention.value_length", own("attention.value_length", dim), dim)
    _require("rope.dimension_count", own("rope.dimension_count", dim), dim)
    _require("expert_count", own("expert_count", 0), 0)
    theta = _real("rope.freq_base", own("rope.freq_base", 10000.0))
    inv_freq = frequencies(theta, _whole("attention.key_length", dim))
    if divisors is not None:
        inv_freq = tuple(f / float(d) for f, d in zip(inv_freq, divisors, strict=True))
    else:
        name, factor = "rope.scaling.type", own("rope.scaling.factor", 1.0)
        scaling = {"rope_type": own(name, "default"), "factor": factor}
        inv_freq = _scaled(inv_freq, scaling)
    longest = _whole("context_length", own("context_length"))
    window = own("attention.sliding_window", None) or longest
    return Config(
        num_layers=own("block_count"),
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        vocab_size=len(field("tokenizer.ggml.tokens")),
        norm_eps=own("attention.layer_norm_rms_epsilon"),
        inv_freq=inv_freq,
        interleaved=kind in ("llama", "mistral"),  # whose rows are permuted
        max_tokens=min(longest, _whole("attention.sliding_window", window)),
    )


# ---- rotary embeddings ---------------------------------------------------------------


def frequencies(theta: float, dim: int) -> tuple[float, ...]:
    """theta ** (−2 i / dim) (Su et al., 2021)."""
    return tuple(theta ** (-2 * i / dim) for i in range(dim // 2))


def _scaled(inv_freq: tuple[float, ...], how: Mapping[str, Any]) -> tuple[float, ...]:
    kind = how.get("rope_type", how.get("type", "default"))
    if kind in ("default", "none", None):
        return inv_freq
    if kind == "linear":
        factor = _real("factor of rope scaling", how.get("factor"))
        return tuple(f / factor for f in inv_freq)
    if kind == "llama3":
        needed = {n: _real(f"{n} of rope scaling", how.get(n)) for n in LLAMA3}
        low, high = needed["low_freq_factor"], needed["high_freq_factor"]
        if not low < high:
            raise UnknownModelError(
                "low_freq_factor of rope scaling must be below high_freq_factor, got "
                f"{low} and {high}"
            )
        return tuple(_llama3(f, needed) for f in inv_freq)
    raise UnknownModelError(
        f"scaling of positions must be linear or llama3, got {kind!r}; this model "
        "needs another server"
    )


LLAMA3 = (
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "factor",
)


def _llama3(frequency: float, how: Mapping[str, float]) -> float:
    """Slow turns are slowed down by the factor, quick ones stay (Llama 3.1)."""
    turns = how["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = how["low_freq_factor"], how["high_freq_factor"]
    quick = min(max((turns - low) / (high - low), 0.0), 1.0)
    return frequency * (quick + (1 - quick) / how["factor"])


# ---- messages ------------------------------------------------------------------------


def _unknown(name: str, got: object) -> UnknownModelError:
    return UnknownModelError(
        f"{name} must be one of {', '.join(FAMILY)}, got {got!r}: only models of the "
        "Llama family are served"
    )


def _whole(name: str, got: Any) -> int:
    if isinstance(got, bool) or not isinstance(got, int) or got < 1:
        raise UnknownModelError(f"{name} must be a whole number from 1 on, got {got!r}")
    return got


def _real(name: str, got: Any) -> float:
    number = isinstance(got, int | float) and not isinstance(got, bool)
    if not number or not 0 < got < math.inf:
        raise UnknownModelError(f"{name} must be a number above 0, got {got!r}")
    return got


def _require(name: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise UnknownModelError(f"{name} must be {wanted!r} to be served, got {got!r}")
