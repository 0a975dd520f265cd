"""Claims about the reference's loading: the original files, all of them and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from mlx_bucket.backend import Strategy
from mlx_bucket.errors import SourceError, UsageError
from mlx_bucket.reference.loading import best_torch_device, load_reference, load_reference_tokenizer
from mlx_bucket.reference.strategies import TorchBackend
from mlx_bucket.sources import resolve
from tests.reference_cases import GENERATING, NESTED, SCORING, make_case, title
from tests.test_gguf import write_gguf
from tests.tiny_folders import WEIGHTS, edit_weights, write_model_folder


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_loads_on_the_cpu_and_stays_near(sources, flat, dtype):
    model = load_reference(sources["qwen2"], dtype=dtype)
    assert TorchBackend(model).name == f"torch cpu {dtype}"
    scores = replace(flat, model=model).run(Strategy("planned", shared_prefix=True)).scores
    truth = flat.truth()
    np.testing.assert_allclose(scores.log_probabilities, truth.log_probabilities, atol=0.5)


def test_the_models_own_generation_defaults_change_no_answer(sources, nested, tmp_path):
    folder = tmp_path / "opinionated"
    shutil.copytree(sources["qwen2"].path, folder)
    winner = nested.truth().greedy_winners[0]
    (token, *_) = nested.tokenizer(NESTED[winner], add_special_tokens=False)["input_ids"]
    defaults = {"suppress_tokens": [token], "repetition_penalty": 9.0, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    opinionated = replace(nested, model=load_reference(resolve(str(folder))))
    run = opinionated.run(Strategy("generate", batch_size=4))
    np.testing.assert_array_equal(run.scores.winners, nested.truth().greedy_winners)


@pytest.mark.parametrize("strategy", [SCORING[0], GENERATING[1]], ids=title)
def test_a_head_that_is_the_embedding_is_read_too(tmp_path, strategy):
    source = resolve(str(write_model_folder(tmp_path / "tied", tie_word_embeddings=True)))
    case = make_case(source, load_reference(source), NESTED)
    truth, scores = case.truth(), case.run(strategy, "greedy").scores
    np.testing.assert_array_equal(scores.winners, truth.greedy_winners)


def test_a_gguf_file_is_loaded_by_transformers_itself(sources, tmp_path):
    path = write_gguf(sources["llama"].path, tmp_path / "model.gguf")
    source = resolve(str(path))
    assert source.kind == "gguf"
    weights = load_reference(source).state_dict()
    for name, weight in load_reference(sources["llama"]).state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_loading_draws_no_bars(sources, tmp_path, capfd, kind):
    folder = sources["llama"].path
    path = write_gguf(folder, tmp_path / "model.gguf") if kind == "gguf" else folder
    source = resolve(str(path))
    capfd.readouterr()
    load_reference(source)
    assert capfd.readouterr() == ("", "")


def test_the_tokenizer_is_that_of_the_original_files(sources, tmp_path):
    text = "order 1234 <|im_end|> 退款"
    source = resolve(str(write_gguf(sources["llama"].path, tmp_path / "model.gguf")))
    found = load_reference_tokenizer(source)(text, add_special_tokens=False)["input_ids"]
    assert found == AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf").encode(
        text, add_special_tokens=False
    )


def test_a_folder_without_one_weight_is_no_reference(tmp_path):
    folder = write_model_folder(tmp_path / "incomplete")
    edit_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(SourceError, match=r"weight model\.norm\.weight"):
        load_reference(resolve(str(folder)))


def test_a_folder_of_pickles_is_no_reference(tmp_path):
    folder = write_model_folder(tmp_path / "pickled")
    source = resolve(str(folder))
    torch.save({}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(SourceError, match="cannot load"):
        load_reference(source)


def test_a_dtype_or_device_that_is_not_there_is_refused(sources):
    source = sources["qwen2"]
    with pytest.raises(UsageError, match="dtype 'int8'"):
        load_reference(source, dtype="int8")
    with pytest.raises(UsageError, match="device 'abacus'"):
        load_reference(source, device="abacus")
    assert best_torch_device() in ("cuda", "mps", "cpu")


def test_without_torch_one_sentence_says_what_to_install():
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom mlx_bucket.errors import UsageError\n"
        "try:\n    import mlx_bucket.reference.oracle\n"
        "except UsageError as error:\n    print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert said == (
        "PyTorch is not installed, so there is no reference to compare with; "
        "install mlx-bucket[reference].\n"
    )
