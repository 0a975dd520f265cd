"""Claims about GGUF files: the logits and tokens of Transformers, or a refusal by name."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlx_bucket.errors import SourceError
from mlx_bucket.gguf import LAYER_NAMES, OTHER_NAMES
from mlx_bucket.sources import resolve
from mlx_bucket.weights import convert, load, load_tokenizer

IDS = np.random.default_rng(1).integers(0, 500, (2, 40))
TEXTS = (
    "Hello, my order 1234 has not arrived!",
    "  12  spaces\n\n\tand 退款 🙂 cafe\u0301 <|im_end|> <tool_call>",
    "it's John's — we'll see… 3.14",
)
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(folder: Path, path: Path, *, packed: bool = False, **values: object) -> Path:
    """Write a Hugging Face folder as llama.cpp's converter does; ``values`` go over the header's.

    ``packed`` quantises the matrices, as far as their width allows.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, str(values.pop("architecture", kind)))
    header = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    for key, value in {**{f"{kind}.{key}": v for key, v in header.items()}, **values}.items():
        if value is not None:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[
                type(value)
            ](key, value)
    _add_tokenizer(writer, folder, config.vocab_size, values)
    names = {theirs: mine for mine, theirs in {**LAYER_NAMES, **OTHER_NAMES}.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        layer, module = _split(name)
        if kind == "llama" and module.split(".")[-1] in heads:
            array = _permuted(array, heads[module.split(".")[-1]])
        full = f"{layer}{names[module]}.{name.rpartition('.')[2]}"
        if packed and array.ndim == 2 and array.shape[1] % 32 == 0:
            writer.add_tensor(full, gguf.quantize(array, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(full, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer, folder, size, values):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {i: 3 if token.special else 4 for i, token in tokenizer.added_tokens_decoder.items()}
    writer.add_tokenizer_model("gpt2")
    if "tokenizer.ggml.pre" not in values:
        writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([added.get(i, 1) for i in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


def _split(name):
    """``model.layers.0.mlp.up_proj.weight`` -> ``blk.0.``, ``mlp.up_proj``."""
    module = name.rpartition(".")[0]
    if not module.startswith("model.layers."):
        return "", module
    _, _, index, rest = module.split(".", 3)
    return f"blk.{index}.", rest


def _permuted(array, heads):
    """llama.cpp's order of q and k rows."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def ours(path, cache):
    entry = convert(resolve(str(path)), dtype="float32", cache=cache)
    return np.array(load(entry).model(mx.array(IDS)))


def reference(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        return model(torch.from_numpy(IDS)).logits.numpy()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_logits_equal_those_of_the_original_folder(tiny_model_folder, tmp_path, model_type, tied):
    folder = tiny_model_folder(model_type, tie_word_embeddings=tied)
    path = write_gguf(folder, tmp_path / "model.gguf")
    np.testing.assert_allclose(ours(path, tmp_path), reference(folder), atol=2e-4, rtol=1e-4)


def test_a_head_width_of_its_own_is_obeyed(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("llama", head_dim=32)
    path = write_gguf(folder, tmp_path / "model.gguf")
    np.testing.assert_allclose(ours(path, tmp_path), reference(folder), atol=2e-4, rtol=1e-4)


def test_biases_of_a_llama_are_put_back_in_order(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("llama", attention_bias=True)
    path = write_gguf(folder, tmp_path / "model.gguf")
    np.testing.assert_allclose(ours(path, tmp_path), reference(folder), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_packed_weights_give_the_logits_of_transformers(tiny_model_folder, tmp_path, model_type):
    folder = tiny_model_folder(model_type, tie_word_embeddings=False)
    path = write_gguf(folder, tmp_path / "model.gguf", packed=True)
    wanted = reference(tmp_path, gguf_file=path.name)
    assert np.abs(wanted - reference(folder)).max() > 1e-3
    np.testing.assert_allclose(ours(path, tmp_path), wanted, atol=2e-4, rtol=1e-4)


def test_the_tokenizer_is_that_of_transformers(tiny_model_folder, tmp_path):
    path = write_gguf(tiny_model_folder("qwen2"), tmp_path / "model.gguf")
    wanted = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    source = resolve(str(path))
    for got in (load_tokenizer(source), load(convert(source, cache=tmp_path)).tokenizer):
        assert [got.encode(text) for text in TEXTS] == [wanted.encode(text) for text in TEXTS]
        assert got.eos_token == wanted.eos_token == "<|im_end|>"
        assert got.chat_template == wanted.chat_template
        assert got.get_added_vocab() == wanted.get_added_vocab()


def test_control_tokens_stay_whole_and_others_are_not_special(tiny_model_folder, tmp_path):
    tokenizer = load_tokenizer(
        resolve(str(write_gguf(tiny_model_folder("qwen2"), tmp_path / "model.gguf")))
    )
    ids = tokenizer.encode("<|im_start|><tool_call>")
    assert len(ids) == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>"


def test_a_file_that_has_gone_is_named(tiny_model_folder, tmp_path):
    path = write_gguf(tiny_model_folder("qwen2"), tmp_path / "model.gguf")
    source = resolve(str(path))
    path.unlink()
    with pytest.raises(SourceError, match=r"The file .*model\.gguf of the model .* cannot be read"):
        convert(source, cache=tmp_path / "cache")


def test_token_ids_are_in_the_generation_config(tiny_model_folder, tmp_path):
    path = write_gguf(tiny_model_folder("qwen2"), tmp_path / "model.gguf")
    entry = convert(resolve(str(path)), cache=tmp_path)
    ids = json.loads((entry.path / "generation_config.json").read_text())
    assert ids["eos_token_id"] == load(entry).tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("model_type", "values", "words"),
    [
        ("qwen2", {"architecture": "gemma3"}, "architecture 'gemma3'"),
        ("qwen2", {"qwen2.embedding_length": None}, "does not say its hidden_size"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "uses scaled rotary embeddings"),
        ("llama", {"llama.attention.sliding_window": 32}, "uses a sliding window"),
        ("llama", {"llama.rope.dimension_count": 8}, "uses partly rotated heads"),
        ("llama", {"llama.expert_count": 8}, "uses experts"),
        ("qwen2", {"qwen2.attention.key_length": 32}, "uses a head width of its own"),
    ],
    ids=str,
)
def test_what_would_be_read_wrongly_is_refused(
    tiny_model_folder, tmp_path, model_type, values, words
):
    path = write_gguf(tiny_model_folder(model_type), tmp_path / "model.gguf", **values)
    with pytest.raises(SourceError, match=words):
        resolve(str(path))


def test_an_unsupported_architecture_fails_before_the_file_is_hashed(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("qwen2")
    path = write_gguf(folder, tmp_path / "model.gguf", architecture="mamba2")
    os.truncate(path, 2**40)
    started = time.monotonic()
    with pytest.raises(SourceError, match="architecture 'mamba2'"):
        resolve(str(path))
    assert time.monotonic() - started < 1


def test_an_unknown_split_rule_is_refused(tiny_model_folder, tmp_path):
    values = {"tokenizer.ggml.pre": "poro-chat"}
    path = write_gguf(tiny_model_folder("llama"), tmp_path / "model.gguf", **values)
    with pytest.raises(SourceError, match="split rule 'poro-chat'"):
        load_tokenizer(resolve(str(path)))


def test_a_tensor_that_the_architecture_does_not_know_is_named(tiny_model_folder, tmp_path):
    path = write_gguf(tiny_model_folder("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_up", b"blk.0.ffn_xx"))
    with pytest.raises(SourceError, match=r"a tensor 'blk\.0\.ffn_xx\.weight' that"):
        convert(resolve(str(path)), cache=tmp_path)


def test_a_tensor_that_cannot_be_unpacked_is_named(tiny_model_folder, tmp_path):
    path = write_gguf(tiny_model_folder("qwen2"), tmp_path / "model.gguf")
    name, content = b"token_embd.weight", path.read_bytes()
    kind = content.index(name) + len(name) + 4 + 2 * 8  # after the name: dimensions, their sizes
    whole_numbers = bytes([gguf.GGMLQuantizationType.I8])
    path.write_bytes(content[:kind] + whole_numbers + content[kind + 1 :])
    with pytest.raises(SourceError, match=r"token_embd\.weight is packed as I8"):
        convert(resolve(str(path)), cache=tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.02, 0.5, 0.99])
def test_a_file_cut_short_is_refused(tiny_model_folder, tmp_path, share):
    path = write_gguf(tiny_model_folder("qwen2"), tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(SourceError, match=r"is not a whole GGUF file|is cut short"):
        resolve(str(path))


def test_no_flipped_header_byte_escapes_as_another_error(tiny_model_folder, tmp_path):
    path = write_gguf(tiny_model_folder("qwen2"), tmp_path / "model.gguf")
    content = path.read_bytes()
    for at in np.random.default_rng(0).integers(0, 3000, 100):
        flipped = bytearray(content)
        flipped[at] ^= 0x41
        path.write_bytes(flipped)
        with contextlib.suppress(SourceError):
            load_tokenizer(resolve(str(path)))


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_real_logits_equal_transformers_own_loading(name, request):
    fixture = {"smollm2-135m": "smollm2", "qwen2.5-coder-0.5b": "qwen_coder"}[name]
    loaded, path = request.getfixturevalue(fixture), resolve(name).path
    ids = np.array(
        [loaded.tokenizer.encode("My parcel has not arrived; please refund order 1234.")]
    )
    got = np.array(loaded.model(mx.array(ids)))
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(got, wanted, atol=1e-3)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_real_tokenizers_equal_transformers_own_loading(name):
    source = resolve(name)
    got = load_tokenizer(source)
    wanted = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    assert [got.encode(text) for text in TEXTS] == [wanted.encode(text) for text in TEXTS]
    assert got.chat_template == wanted.chat_template
    assert got.special_tokens_map == wanted.special_tokens_map
    assert got.get_added_vocab() == wanted.get_added_vocab()
