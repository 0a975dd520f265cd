"""Claims about names: what each one means, and what is refused before any weight is touched."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from mlx_bucket.errors import SourceError, UsageError
from mlx_bucket.sources import DEFAULT_PRESET, resolve
from tests.tiny_folders import WEIGHTS, edit_config


def test_the_default_preset_is_qwen():
    assert DEFAULT_PRESET == "qwen2.5-0.5b"


def test_a_folder_is_a_source(tiny_model_folder):
    folder = tiny_model_folder("qwen3")
    source = resolve(str(folder))
    assert (source.kind, source.path, source.config["model_type"]) == ("folder", folder, "qwen3")


def test_identity_is_the_content_not_the_place(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("qwen2")
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert resolve(str(copy)).identity == resolve(str(folder)).identity


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_identity_changes_with_any_file(tiny_model_folder, name):
    folder = tiny_model_folder("qwen2")
    before = resolve(str(folder)).identity
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content.replace(b"2", b"3", 1) if name != WEIGHTS else content[:-1])
    assert resolve(str(folder)).identity != before


def test_without_weights_a_folder_needs_none(tiny_model_folder):
    folder = tiny_model_folder("qwen2")
    (folder / WEIGHTS).unlink()
    assert resolve(str(folder), weights=False).config["hidden_size"] == 64


def test_without_weights_identity_is_that_of_the_weights_if_they_are_there(tiny_model_folder):
    folder = tiny_model_folder("qwen2")
    assert resolve(str(folder), weights=False) == resolve(str(folder))


def test_an_unsupported_model_fails_within_a_second_before_its_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    with (tmp_path / WEIGHTS).open("wb") as weights:
        weights.truncate(2**40)
    started = time.monotonic()
    with pytest.raises(SourceError, match=r"of type 'mamba2', .* qwen2, qwen3, llama"):
        resolve(str(tmp_path))
    assert time.monotonic() - started < 1


SLIDING = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
FULL_AND_SLIDING = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        ("qwen2", {**SLIDING, "layer_types": None}, "uses a sliding window"),
        ("qwen3", {**SLIDING, "layer_types": None}, "uses a sliding window"),
        ("qwen2", {"layer_types": FULL_AND_SLIDING}, "uses a sliding window"),
        ("llama", {"layer_types": FULL_AND_SLIDING}, "uses a sliding window"),
        ("llama", {"sliding_window": 32}, "uses a sliding window"),
        ("llama", {"hidden_act": "gelu"}, "uses the activation 'gelu'"),
        ("qwen3", {"attention_bias": True}, "uses attention biases"),
        ("qwen2", {"head_dim": 32}, "uses a head width of its own"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "brings its own code"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "is quantised already"),
        ("llama", {"quantization": {"bits": 4, "group_size": 64}}, "is quantised already"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "no language model head"),
        ("llama", {"num_hidden_layers": "two"}, "config of the model .* is broken"),
        ("llama", {"num_attention_heads": 0}, "is broken: num_attention_heads is 0"),
        ("qwen2", {"num_key_value_heads": 3}, "is broken: .*num_key_value_heads"),
        ("qwen2", {"max_position_embeddings": -1}, "is broken: max_position_embeddings is -1"),
        ("qwen3", {"head_dim": 1.5}, "is broken: .*head_dim"),
        ("llama", {"rms_norm_eps": "a"}, "is broken: .*rms_norm_eps"),
        ("llama", {"rope_parameters": {"rope_theta": "a"}}, "is broken: rope_theta is 'a'"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "is broken: rope_theta is 0"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": "2"}},
            "is broken: factor is '2'",
        ),
        ("llama", {"layer_types": [[]]}, "config of the model .* is broken"),
        ("llama", {"auto_map": 5}, "config of the model .* is broken"),
        ("llama", {"architectures": 5}, "config of the model .* is broken"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}},
            "type 'yarn' with .*attention_factor",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "rotary embeddings .*partial_rotary_factor"),
    ],
    ids=str,
)
def test_what_would_be_answered_wrongly_is_refused_by_name(
    tiny_model_folder, model_type, change, words
):
    folder = tiny_model_folder(model_type)
    edit_config(folder, lambda config: config.update(change))
    with pytest.raises(SourceError, match=words):
        resolve(str(folder))


@pytest.mark.parametrize("unused", [{"use_sliding_window": False}, {"max_window_layers": 2}])
def test_a_sliding_window_that_no_layer_uses_is_accepted(tiny_model_folder, unused):
    folder = tiny_model_folder("qwen2")
    edit_config(folder, lambda config: config.update({**SLIDING, "layer_types": None, **unused}))
    assert resolve(str(folder)).config["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "\xff", "[" * 100_000], ids=lambda text: text[:9]
)
def test_a_broken_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(SourceError, match=r"The config .*config\.json is not"):
        resolve(str(tmp_path))


def test_a_folder_without_a_config_is_no_model(tmp_path):
    with pytest.raises(SourceError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_a_file_that_cannot_be_read_is_named(tiny_model_folder):
    folder = tiny_model_folder("qwen2")
    (folder / WEIGHTS).unlink()
    (folder / "loop.json").symlink_to("loop.json")
    with pytest.raises(SourceError, match=r"The file .*loop\.json of the model .* cannot be read"):
        resolve(str(folder), weights=False)


def test_a_pickle_is_refused_by_name(tiny_model_folder):
    folder = tiny_model_folder("qwen2")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"only as a pickle \(pytorch_model\.bin\)"):
        resolve(str(folder))


def test_a_folder_without_weights_is_refused(tiny_model_folder):
    folder = tiny_model_folder("qwen2")
    (folder / WEIGHTS).unlink()
    with pytest.raises(SourceError, match=r"holds no model\*\.safetensors"):
        resolve(str(folder))


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_a_missing_shard_is_named(tiny_model_folder, index):
    folder = tiny_model_folder("llama", shard_size="100KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].unlink()
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(SourceError, match=f"{shards[1].name} is missing"):
        resolve(str(folder))


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": []}'])
def test_a_broken_index_is_named(tiny_model_folder, content):
    folder = tiny_model_folder("llama", shard_size="100KB")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(SourceError, match=r"The index .* is broken"):
        resolve(str(folder))


def test_an_index_cannot_point_out_of_its_folder(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("llama", shard_size="100KB")
    (tmp_path / "secret.safetensors").touch()
    outside = {"weight_map": {"a": str(tmp_path / "secret.safetensors")}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(outside))
    with pytest.raises(SourceError, match=r"secret\.safetensors is missing"):
        resolve(str(folder))


def test_a_revision_of_a_folder_is_refused(tiny_model_folder):
    folder = tiny_model_folder("qwen2")
    with pytest.raises(SourceError, match="not on the hub, so it has no revision main"):
        resolve(str(folder), revision="main")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/dev/null", "The model /dev/null is neither a folder nor a file"),
        ("no/such.gguf", "There is no file no/such.gguf"),
        ("such.GGUF", "There is no file such.GGUF"),
        ("~nosuchuser/x", "in the home of a user who is not known here"),
        ("x" * 300 + "/y", "cannot be read .*File name too long"),
    ],
    ids=["device", "gguf", "GGUF", "user", "long"],
)
def test_a_name_that_cannot_be_a_model_is_refused(name, words):
    with pytest.raises(SourceError, match=words):
        resolve(name)


def test_an_empty_name_is_wrong_usage():
    with pytest.raises(UsageError, match="name is empty"):
        resolve("")


def test_a_file_nested_without_end_is_named(tiny_model_folder):
    folder = tiny_model_folder("llama", shard_size="100KB")
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(SourceError, match="nested without end"):
        resolve(str(folder))


def test_a_file_that_is_no_gguf_is_refused():
    with pytest.raises(SourceError, match="is not a whole GGUF file"):
        resolve(str(Path(__file__)))
