"""Claims about conversion: the reference's logits, nothing silently wrong, little memory."""

from __future__ import annotations

import json
import tracemalloc

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlx_bucket.cache import Quantisation
from mlx_bucket.errors import SourceError, UsageError, WeightsError
from mlx_bucket.sources import resolve
from mlx_bucket.weights import convert, load, load_tokenizer
from tests.tiny_folders import WEIGHTS, edit_config, edit_weights

IDS = np.random.default_rng(0).integers(0, 500, (2, 48))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DEFAULTS = ("rms_norm_eps", "tie_word_embeddings", "rope_parameters", "num_key_value_heads")


def ours(folder, cache, **options):
    """Logits of the converted folder, (rows, tokens, vocabulary)."""
    entry = convert(resolve(str(folder)), cache=cache, **{"dtype": "float32", **options})
    return np.array(load(entry).model(mx.array(IDS)))


def reference(folder):
    """Logits of Transformers on the original folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(IDS)).logits.numpy()


def assert_same_logits(folder, cache):
    wanted = reference(folder)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(ours(folder, cache), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_logits_equal_the_reference(tiny_model_folder, tmp_path, model_type, tied):
    assert_same_logits(tiny_model_folder(model_type, tie_word_embeddings=tied), tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_narrow_checkpoints_equal_the_reference(tiny_model_folder, tmp_path, dtype):
    assert_same_logits(tiny_model_folder("qwen2", dtype=dtype), tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"num_key_value_heads": 4},
        {"rms_norm_eps": 0.3},
    ],
    ids=str,
)
def test_logits_of_llama_variants_equal_the_reference(tiny_model_folder, tmp_path, options):
    assert_same_logits(tiny_model_folder("llama", **options), tmp_path)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 50.0},
        {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0},
        {**YARN, "rope_theta": 50.0},
        {**YARN, "rope_theta": 1e4, "beta_fast": 16.0, "beta_slow": 2.0},
        LLAMA3,
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_nested_rope_parameters_are_obeyed(tiny_model_folder, tmp_path, model_type, rope):
    assert_same_logits(tiny_model_folder(model_type, rope_parameters=rope), tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_flat_rope_parameters_of_older_configs_are_obeyed(tiny_model_folder, tmp_path, model_type):
    folder = tiny_model_folder(model_type, rope_parameters=LLAMA3)

    def flatten(config):
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope

    edit_config(folder, flatten)
    assert_same_logits(folder, tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_omitted_fields_mean_what_transformers_takes_them_for(
    tiny_model_folder, tmp_path, model_type
):
    heads = {"num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None}
    folder = tiny_model_folder(model_type, **heads)
    dropped = (*DEFAULTS, "head_dim") if model_type != "qwen2" else DEFAULTS
    edit_config(folder, lambda config: [config.pop(name) for name in dropped])
    assert_same_logits(folder, tmp_path)


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_shards_equal_the_reference(tiny_model_folder, tmp_path, index):
    folder = tiny_model_folder("llama", shard_size="100KB")
    wanted = reference(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    np.testing.assert_allclose(ours(folder, tmp_path), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}),
        lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].flip(0).contiguous()}),
        lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}),
    ],
    ids=["equal head", "head of its own", "head only"],
)
def test_a_head_in_a_tied_checkpoint_is_treated_as_the_reference_does(
    tiny_model_folder, tmp_path, edit
):
    folder = tiny_model_folder("qwen2", tie_word_embeddings=True)
    edit_weights(folder, edit)
    assert_same_logits(folder, tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_left_out(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert_same_logits(folder, tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrowing_rounds_as_torch_does(tiny_model_folder, tmp_path, dtype):
    folder = tiny_model_folder("qwen2")
    name, limit = "model.layers.0.mlp.up_proj.weight", 65_504.0
    bits = torch.randint(-(2**31), 2**31 - 1, (96, 64), dtype=torch.int32)
    bits[::2] = bits[::2] // 2**16 * 2**16 + 2**15  # halfway between two of bfloat16
    bits[1::4] = bits[1::4] // 2**13 * 2**13 + 2**12  # and of float16
    wild = bits.view(torch.float32).nan_to_num(0.0).clamp(-limit, limit)
    edit_weights(folder, lambda tensors: tensors.update({name: wild}))
    model = load(convert(resolve(str(folder)), dtype=dtype, cache=tmp_path)).model
    got = np.array(dict(tree_flatten(model.parameters()))[name].astype(mx.float32))
    np.testing.assert_array_equal(got, wild.to(getattr(torch, dtype)).float().numpy())


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (float("nan"), "float32", "not finite"),
        (float("-inf"), "float16", "not finite"),
        (65_520.0, "float16", "65520, which is too large for float16"),
        (-3.4e38, "bfloat16", "3.4e\\+38, which is too large for bfloat16"),
    ],
)
def test_a_number_that_would_not_survive_is_refused_by_name(
    tiny_model_folder, tmp_path, value, dtype, words
):
    folder = tiny_model_folder("qwen2")
    name = "model.layers.1.self_attn.k_proj.bias"
    edit_weights(folder, lambda tensors: tensors[name].fill_(value))
    with pytest.raises(WeightsError, match=f"{name} .*{words}"):
        convert(resolve(str(folder)), dtype=dtype, cache=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_largest_float16_is_kept(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("qwen2")
    name = "model.norm.weight"
    edit_weights(folder, lambda tensors: tensors[name].fill_(65_519.0))
    model = load(convert(resolve(str(folder)), dtype="float16", cache=tmp_path)).model
    assert model.model.norm.weight[0].item() == 65_504.0


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(HEAD), f"lacks the tensor {HEAD}"),
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks the tensor model.norm.weight"),
        (
            lambda tensors: tensors.update({"score.weight": torch.ones(2)}),
            "holds the tensor score.weight, which",
        ),
        (
            lambda tensors: tensors.update({EMBEDDING: torch.ones(10, 64)}),
            rf"{EMBEDDING} in the shape \(10, 64\), where its config asks for \(512, 64\)",
        ),
    ],
    ids=["no head", "missing", "unexpected", "shape"],
)
def test_weights_that_are_not_the_models_are_named(tiny_model_folder, tmp_path, edit, words):
    folder = tiny_model_folder("qwen2", tie_word_embeddings=False)
    edit_weights(folder, edit)
    with pytest.raises(WeightsError, match=words):
        convert(resolve(str(folder)), cache=tmp_path)


def test_a_tensor_in_two_shards_is_named(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("llama", shard_size="100KB")
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(SourceError, match=r"holds the tensor \S+ twice"):
        convert(resolve(str(folder)), cache=tmp_path)


@pytest.mark.parametrize("bytes_left", [0, 5, 300, 30_000])
def test_a_weight_file_cut_short_is_named(tiny_model_folder, tmp_path, bytes_left):
    folder = tiny_model_folder("qwen2")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:bytes_left])
    with pytest.raises(SourceError, match="cut short or broken"):
        convert(resolve(str(folder)), cache=tmp_path)


def test_whole_numbers_are_not_taken_for_weights(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("qwen2")
    whole = {"model.norm.weight": torch.ones(64, dtype=torch.int8)}
    edit_weights(folder, lambda tensors: tensors.update(whole))
    with pytest.raises(SourceError, match=r"model.norm.weight .* holds numbers of type I8"):
        convert(resolve(str(folder)), cache=tmp_path)


def test_quantised_logits_are_near_the_exact_ones(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("qwen2", tie_word_embeddings=False)
    exact = ours(folder, tmp_path)
    coarse = ours(folder, tmp_path, quantisation=Quantisation(8, 32))
    assert 0 < np.abs(exact - coarse).max() < 0.05 * np.abs(exact).max()


def test_a_quantised_entry_is_as_small_as_its_bits(tiny_model_folder, tmp_path):
    source = resolve(str(tiny_model_folder("qwen2", hidden_size=128)))
    whole = convert(source, dtype="float16", cache=tmp_path)
    small = convert(source, dtype="float16", quantisation=Quantisation(4, 32), cache=tmp_path)
    # 4 bits, and a scale and an offset of 16 bits for 32 weights: 5 of 16 bits.
    share = (small.path / WEIGHTS).stat().st_size / (whole.path / WEIGHTS).stat().st_size
    assert 5 / 16 < share < 0.4


def test_a_group_size_that_does_not_divide_a_layer_is_refused(tiny_model_folder, tmp_path):
    source = resolve(str(tiny_model_folder("qwen2")))
    with pytest.raises(WeightsError, match="down_proj has 96 inputs, which groups of 64"):
        convert(source, quantisation=Quantisation(4, 64), cache=tmp_path)


@pytest.mark.parametrize(("bits", "group_size"), [(7, 64), (4, 48)])
def test_an_impossible_quantisation_is_refused(bits, group_size):
    with pytest.raises(UsageError, match=f"{bits} bits in groups of {group_size}"):
        Quantisation(bits, group_size)


def test_the_tokenizer_survives(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("qwen3")
    wanted = AutoTokenizer.from_pretrained(folder)
    got = load(convert(resolve(str(folder)), cache=tmp_path)).tokenizer
    text = "refund <|im_end|> <tool_call>  1234 退款 🙂\n\n cafe\u0301"
    chat = [{"role": "user", "content": text}]
    assert got.encode(text) == wanted.encode(text)
    assert got.get_added_vocab() == wanted.get_added_vocab()
    assert got.eos_token == wanted.eos_token
    assert got.apply_chat_template(chat, tokenize=False) == wanted.apply_chat_template(
        chat, tokenize=False
    )


def test_the_tokenizer_of_a_source_needs_no_weights(tiny_model_folder):
    folder = tiny_model_folder("qwen2")
    (folder / WEIGHTS).unlink()
    tokenizer = load_tokenizer(resolve(str(folder), weights=False))
    assert tokenizer.decode(tokenizer.encode("my order")) == "my order"


def test_a_folder_without_a_tokenizer_is_refused(tiny_model_folder):
    folder = tiny_model_folder("qwen2")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(SourceError, match="none of the tokenizer files"):
        load_tokenizer(resolve(str(folder)))


def test_code_that_a_tokenizer_brings_is_never_run(tiny_model_folder):
    folder = tiny_model_folder("qwen2")
    wanted = load_tokenizer(resolve(str(folder))).encode("my order")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('the code was run')")
    assert load_tokenizer(resolve(str(folder))).encode("my order") == wanted


def test_the_generation_config_survives(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("qwen2")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    entry = convert(resolve(str(folder)), cache=tmp_path)
    assert json.loads((entry.path / "generation_config.json").read_text())["eos_token_id"] == [2, 1]


def test_a_model_is_converted_once(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("qwen2")
    source = resolve(str(folder))
    first = convert(source, cache=tmp_path)
    (folder / WEIGHTS).unlink()
    assert convert(source, cache=tmp_path) == first


def test_conversion_needs_little_memory(tiny_model_folder, tmp_path):
    """A checkpoint of 130 MB is converted a few megabytes at a time."""
    folder = tiny_model_folder("qwen2", vocab_size=500_000, tie_word_embeddings=True)
    source = resolve(str(folder))
    load_tokenizer(source)  # imports what it needs
    tracemalloc.start()
    convert(source, cache=tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6
