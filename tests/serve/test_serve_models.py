"""Models are read from folders and GGUF files, and compute what their numbers say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_files import KINDS, LLAMA3, TinyModel, dense_logits, tokenizer
from serve.config import UnknownModelError
from serve.llama import Rows, forward
from serve.models import LoadedModel, load_model, random_model

from jax_kvblock import BlockSpec, KVPool

pytestmark = pytest.mark.usefixtures("exact_products")
TOKENS = np.random.default_rng(3).integers(256, size=90)


def logits_of(model: LoadedModel, tokens: np.ndarray) -> np.ndarray:
    """In two chunks, over the blocks of a pool."""
    config = model.config
    compute = jax.jit(forward, static_argnums=0)
    spec = BlockSpec(
        config.num_layers, 2, 8, config.num_kv_heads, config.head_dim, model.dtype
    )
    pool, table = KVPool.zeros(spec, 16), np.random.default_rng(0).permutation(16)
    found = []
    for chunk in np.split(np.arange(len(tokens)), 2):
        rows = Rows(
            tokens=jnp.asarray(tokens[chunk]),
            positions=jnp.asarray(chunk),
            slots=jnp.asarray(table[chunk // 8] * 8 + chunk % 8),
            tables=jnp.asarray(table[None]),
            kv_lens=jnp.asarray([chunk[-1] + 1]),
            query_start=jnp.asarray([0, len(chunk)]),
            tree_mask=None,
        )
        outputs = jnp.arange(len(chunk))
        logits, pool = compute(config, model.params, pool, rows, outputs)
        found.append(np.asarray(logits))
    return np.concatenate(found)


@pytest.mark.parametrize("kind", KINDS)
def test_both_formats_give_the_logits_of_float64(kind: str, tmp_path: Path) -> None:
    drawn = TinyModel.draw(kind)
    wanted = dense_logits(drawn, TOKENS)
    folder = load_model(drawn.write_folder(tmp_path / "folder"))
    file = load_model(str(drawn.write_gguf(tmp_path / "file.gguf")))
    for model in (folder, file):
        np.testing.assert_allclose(logits_of(model, TOKENS), wanted, atol=2e-4)
    assert file.config.interleaved == (drawn.config["model_type"] == "llama")
    assert folder.name == "folder" and file.name == "file"


def test_each_option_changes_the_logits() -> None:
    """Else the test above would not see that one is ignored."""
    plain = TinyModel.draw("llama")
    for kind in ("llama3", "linear"):
        config = {**plain.config, "rope_scaling": KINDS[kind]["rope_scaling"]}
        other = dense_logits(TinyModel(config, plain.tensors), TOKENS)
        assert np.abs(other - dense_logits(plain, TOKENS)).max() > 0.1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_weights_of_other_dtypes(dtype: str, tmp_path: Path) -> None:
    drawn = TinyModel.draw()
    model = load_model(drawn.write_folder(tmp_path / "model", jnp.dtype(dtype)))
    for name, tensor in drawn.tensors.items():
        drawn.tensors[name] = tensor.astype(jnp.dtype(dtype)).astype(np.float32)
    wanted = dense_logits(drawn, TOKENS)
    np.testing.assert_allclose(logits_of(model, TOKENS), wanted, atol=2e-4)


def test_a_file_of_several_quantizations(tmp_path: Path) -> None:
    """As they are written: most of a file in one, some tensors in another."""
    gguf = pytest.importorskip("gguf")
    # Rows are of whole blocks, 32 numbers.
    drawn = TinyModel.draw(hidden_size=64, intermediate_size=96)
    of = {"self_attn": "Q8_0", "mlp": "Q5_1", "lm_head": "Q4_0", "embed_tokens": "F16"}

    def form(name: str) -> Any:
        found = [of[part] for part in of if part in name]
        return getattr(gguf.GGMLQuantizationType, found[0]) if found else None

    file = drawn.write_gguf(tmp_path / "file.gguf", form)
    tensors = {
        tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors
    }
    assert {*of.values(), "F32"} == set(tensors.values())
    for name, tensor in drawn.tensors.items():
        if form(name) is not None:
            kept = gguf.quants.quantize(tensor, form(name))
            drawn.tensors[name] = gguf.quants.dequantize(kept, form(name))
            assert 0 < np.abs(drawn.tensors[name] - tensor).max() < 0.1 * tensor.max()
    # Q8_0 by hand: a scale of 16 bits for 32 numbers, and the numbers of 8 bits.
    name = "model.layers.0.self_attn.q_proj.weight"
    rows = TinyModel.draw(hidden_size=64, intermediate_size=96).tensors[name]
    scale = np.abs(rows.reshape(-1, 32)).max(1, keepdims=True) / np.float32(127)
    wanted = np.rint(rows.reshape(-1, 32) / scale) * scale.astype(np.float16)
    np.testing.assert_allclose(
        drawn.tensors[name], wanted.reshape(rows.shape), rtol=1e-6
    )
    found = logits_of(load_model(file), TOKENS)
    np.testing.assert_allclose(found, dense_logits(drawn, TOKENS), atol=2e-4)


def test_a_model_in_bfloat16_is_near(tmp_path: Path) -> None:
    drawn = TinyModel.draw()
    model = load_model(drawn.write_folder(tmp_path / "model"), dtype="bfloat16")
    assert model.params["layers"][0]["qkv"].dtype == model.dtype == jnp.bfloat16
    wanted = dense_logits(drawn, TOKENS)
    error = np.abs(logits_of(model, TOKENS) - wanted)
    assert error.max() > 1e-3 and error.mean() < 0.05 * wanted.std()


def test_positions_far_out_are_exact() -> None:
    """An angle of float32 alone would be off by 0.004 there."""
    from serve.llama import turns

    config = random_model().config
    place = 131_072 + 77
    found = np.asarray(turns(config, jnp.asarray([place])))[0]
    angle = place * np.array(config.inv_freq)
    wanted = np.concatenate([np.cos(angle), np.sin(angle)])
    np.testing.assert_allclose(found, wanted, atol=1e-6)


# ---- text ----------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "  be brief "},
    {"role": "user", "content": "the <|turn|> on"},
]


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_text_and_chats_as_tokens(form: str, tmp_path: Path) -> None:
    drawn, wanted = TinyModel.draw(), tokenizer()
    if form == "folder":
        model = load_model(drawn.write_folder(tmp_path / "model"))
    else:
        model = load_model(drawn.write_gguf(tmp_path / "model.gguf"))
    tokens = model.tokenizer
    text = "then the inner one, naïve 漢"
    assert tokens.encode(text) == wanted.encode(text).ids
    assert tokens.decode(tokens.encode(text)) == text
    assert tokens.end_tokens == {wanted.token_to_id("</s>")}
    assert tokens.vocab_size == wanted.get_vocab_size()
    chat = "<s><|turn|>system\nbe brief<|turn|>user\nthe <|turn|> on<|turn|>assistant\n"
    assert tokens.encode_chat(CHAT) == wanted.encode(chat).ids
    with pytest.raises(ValueError, match="no tools here"):
        tokens.encode_chat([{"role": "tool", "content": ""}])
    with pytest.raises(ValueError, match="there must be a message"):
        tokens.encode_chat([])
    with pytest.raises(ValueError, match="content of a message must be a text, got 3"):
        tokens.encode_chat([{"role": "user", "content": 3}])


def test_a_model_without_a_template_has_no_chats(tmp_path: Path) -> None:
    path = TinyModel.draw().write_folder(tmp_path / "model")
    (path / "tokenizer_config.json").unlink()
    model = load_model(path)
    assert model.tokenizer.end_tokens == {tokenizer().token_to_id("</s>")}
    with pytest.raises(ValueError, match="no template"):
        model.tokenizer.encode_chat(CHAT)


def test_templates_apart_and_by_name(tmp_path: Path) -> None:
    path = TinyModel.draw().write_folder(tmp_path / "model")
    about = path / "tokenizer_config.json"
    named = [{"name": n, "template": n} for n in ("tools", "default")]
    about.write_text(json.dumps({"chat_template": named}))
    tokens = load_model(path).tokenizer
    assert tokens.decode(tokens.encode_chat(CHAT)) == "default"
    (path / "chat_template.jinja").write_text("apart")
    tokens = load_model(path).tokenizer
    assert tokens.decode(tokens.encode_chat(CHAT)) == "apart"


def test_sentence_pieces_merge_the_highest_score_first() -> None:
    """Against the rule itself: of all neighbours the best pair, the leftmost one."""
    import gguf
    from serve import gguf_tokenizer

    pieces = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -5.0, "bc": -4.5}
    pieces |= {"▁a": -6.0, "abc": -7.0, "▁ab": -6.5, "cc": -8.0, "é": -9.0}
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.NORMAL] * len(pieces)
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }

    def field(name: str, *default: Any) -> Any:
        return fields.get(name, *default)

    def by_rule(text: str) -> list[str]:
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            pairs = [a + b for a, b in itertools.pairwise(parts)]
            known = [(pieces[p], -i) for i, p in enumerate(pairs) if p in pieces]
            if not known:
                return parts
            place = -max(known)[1]
            parts[place : place + 2] = [pairs[place]]

    tokens = gguf_tokenizer.of_gguf(field)
    random = np.random.default_rng(0)
    for _ in range(50):
        text = "".join(random.choice(list("abc é"), size=12)).strip()
        found = tokens.encode(text)
        assert [texts[i] for i in found] == ["<s>", *by_rule(text)]
        assert tokens.decode(found) == text
    assert [texts[i] for i in tokens.encode("☃")[2:]] == ["<0xE2>", "<0x98>", "<0x83>"]
    assert tokens.decode(tokens.encode("☃ a")) == "☃ a"
    fields["tokenizer.ggml.model"] = "wordpiece"
    with pytest.raises(UnknownModelError, match="must be gpt2 or llama"):
        gguf_tokenizer.of_gguf(field)


# ---- what is refused -----------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "gpt_neox"}, "model_type must be one of llama"),
    "none": ({"model_type": None}, "model_type must be one of llama"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn"}}, "linear or llama3, got 'yarn'"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    "quantized": ({"quantization_config": {}}, "quantization_config must be None"),
    "no width": ({"hidden_size": None}, "hidden_size is missing"),
    "heads": ({"num_key_value_heads": 3}, "no multiple of 3 KV heads"),
    "another shape": ({"num_attention_heads": 2}, r"q_proj.weight must be \[32, 48\]"),
    "no number of KV heads": ({"num_key_value_heads": "2"}, "whole number .* got '2'"),
    "no heads": ({"num_attention_heads": 0}, "whole number from 1 on, got 0"),
    "no length": ({"max_position_embeddings": 0}, "whole number from 1 on, got 0"),
    "no theta": ({"rope_theta": "x"}, "rope_theta must be a number above 0, got 'x'"),
    "no scaling": ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "factor of rope scaling must"),
    "a window of no size": ({"sliding_window": "x"}, "sliding_window must be a whole"),
    "no head dim": ({"head_dim": "x"}, "head_dim must be a whole number .*, got 'x'"),
    "low and high": (
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        "low_freq_factor of rope scaling must be below high_freq_factor, got 1.0 and 1",
    ),
    "no end": ({"eos_token_id": "x"}, r"eos_token_id must be a token's number, .*'x'"),
    "no factors": ({"rope_scaling": {"rope_type": "llama3"}}, "original_max_position_"),
    "more layers": ({"num_hidden_layers": 3}, "layers.2.self_attn.q_proj.weight are"),
    "fewer layers": ({"num_hidden_layers": 1}, "tensors are none of a Llama's, such"),
}


@pytest.mark.cases(len(REFUSED))
@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused(case: str, tmp_path: Path) -> None:
    changed, message = REFUSED[case]
    drawn = TinyModel.draw()
    drawn.config |= changed
    path = drawn.write_folder(tmp_path / "model")
    with pytest.raises(UnknownModelError, match=message) as raised:
        load_model(path)
    assert str(path) in str(raised.value)


def test_windows_bound_the_length(tmp_path: Path) -> None:
    """In front of its window a model with one sees all, like one without."""
    drawn = TinyModel.draw()
    drawn.config |= {"model_type": "mistral", "sliding_window": 128}
    assert load_model(drawn.write_folder(tmp_path / "a")).max_tokens == 128
    drawn.config["use_sliding_window"] = False
    assert load_model(drawn.write_folder(tmp_path / "b")).max_tokens == 512


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf is missing"):
        load_model(tmp_path / "nowhere.gguf")
    path = TinyModel.draw().write_folder(tmp_path / "model")
    with pytest.raises(ValueError, match="dtype must be one of"):
        load_model(path, dtype="int8")
    weights = path / "model-0.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with pytest.raises(UnknownModelError, match="is cut off"):
        load_model(path)
    weights.write_bytes(b"\xff" * 100)
    with pytest.raises(UnknownModelError, match="no safetensors file"):
        load_model(path)
    weights.write_bytes(whole)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnknownModelError, match="is no tokenizer"):
        load_model(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        load_model(path)
    (path / "config.json").write_text("[")
    with pytest.raises(UnknownModelError, match="is no JSON"):
        load_model(path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    (path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="has no"):
        load_model(path)
    broken = tmp_path / "broken.gguf"
    whole = TinyModel.draw().write_gguf(tmp_path / "whole.gguf").read_bytes()
    count = whole[:8] + b"\xff" * 8 + whole[16:]
    for data in (b"GGML" + bytes(100), whole[: len(whole) // 2], count):
        broken.write_bytes(data)
        with pytest.raises(UnknownModelError, match="is no GGUF file, or damaged"):
            load_model(broken)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("eos_token", 5),
        ("bos_token", {"content": [1]}),
        ("chat_template", {"a": 1}),
        ("chat_template", [{"name": "default", "template": 3}]),
    ],
)
def test_what_a_tokenizer_cannot_be(name: str, given: Any, tmp_path: Path) -> None:
    path = TinyModel.draw().write_folder(tmp_path / "model")
    (path / "tokenizer_config.json").write_text(json.dumps({name: given}))
    with pytest.raises(UnknownModelError, match=f"{name} must be a text, got"):
        load_model(path)


WRONG_HEADERS: list[Any] = [
    [1],
    None,
    {"a": 3},
    *(
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **change}}
        for change in (
            {"data_offsets": None},
            {"data_offsets": ["a", "b"]},
            {"data_offsets": [0, 4, 8]},
            {"data_offsets": [-8, -4]},
            {"data_offsets": [4, 0]},
            {"data_offsets": [0, 2]},
            {"shape": "x"},
            {"shape": [2]},
            {"shape": [-1]},
            {"dtype": None},
        )
    ),
]


@pytest.mark.cases(len(WRONG_HEADERS))
@pytest.mark.parametrize("header", WRONG_HEADERS, ids=str)
def test_headers_that_are_damaged(header: Any, tmp_path: Path) -> None:
    path = TinyModel.draw().write_folder(tmp_path / "model")
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(8)
    (path / "model-0.safetensors").write_bytes(data)
    told = "is damaged: a must have" if isinstance(header, dict) else "no safetensors f"
    with pytest.raises(UnknownModelError, match=told):
        load_model(path)


def test_gguf_files_of_other_models(tmp_path: Path) -> None:
    drawn = TinyModel.draw()
    drawn.config["model_type"] = "gemma"
    with pytest.raises(UnknownModelError, match=r"one of llama.* got 'gemma'"):
        load_model(drawn.write_gguf(tmp_path / "a.gguf"))
    drawn = TinyModel.draw()
    del drawn.tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UnknownModelError, match=r"blk\.1\.ffn_up\.weight are missing"):
        load_model(drawn.write_gguf(tmp_path / "b.gguf"))
