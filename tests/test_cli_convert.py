"""Claims about ``mlx-bucket convert`` and ``mlx-bucket cache``, called as a user calls them."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from mlx_bucket.cache import read_entry, verify
from mlx_bucket.cli import commands
from mlx_bucket.device import current_device, resolve_dtype


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command with an empty cache, and gives its result."""
    monkeypatch.setenv("MLX_BUCKET_CACHE", str(tmp_path))

    def run_command(*arguments, code=0):
        result = CliRunner().invoke(commands, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        return result

    return run_command


@pytest.fixture
def converted(run, tiny_model_folder):
    """What ``convert --json`` says of a tiny model."""
    return json.loads(run("convert", tiny_model_folder("qwen2"), "--json").stdout)


def flip_the_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_convert_says_what_was_made(run, tiny_model_folder):
    out = run("convert", tiny_model_folder("qwen2")).stdout
    names = [line.split()[0] for line in out.splitlines()]
    assert names == ["key", "path", "size", "dtype", "seconds"]
    assert re.search(r"^dtype +float16$", out, re.MULTILINE)


def test_convert_as_json_names_a_sound_entry(converted, tmp_path):
    entry = read_entry(converted["key"], tmp_path)
    verify(entry)
    assert converted["path"] == str(entry.path)
    assert converted["bytes"] == entry.size
    assert (converted["dtype"], converted["q_bits"]) == ("float16", None)
    assert converted["seconds"] >= 0


def test_convert_quantises(run, tiny_model_folder):
    arguments = ("--q-bits", 8, "--q-group-size", 32)
    folder = tiny_model_folder("qwen2")
    out = run("convert", folder, *arguments).stdout
    assert "float16, quantised to 8 bits in groups of 32" in out


def test_auto_is_the_number_format_of_the_device(run, tiny_model_folder):
    out = run("convert", tiny_model_folder("qwen2"), "--dtype", "auto", "--json").stdout
    assert json.loads(out)["dtype"] == resolve_dtype("auto", current_device())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dtype", "float8"), "'float8' is not one of"),
        (("--q-group-size", 64), "--q-group-size needs --q-bits"),
        (("--q-bits", 7), "cannot be quantised to 7 bits"),
        (("--q-bits", 4, "--q-group-size", 0), "4 bits in groups of 0"),
    ],
)
def test_wrong_usage_ends_with_2(run, tiny_model_folder, arguments, words):
    assert words in run("convert", tiny_model_folder("qwen2"), *arguments, code=2).stderr


def test_a_model_that_cannot_be_had_ends_with_1_and_one_sentence(run, tmp_path):
    result = run("convert", tmp_path, code=1)
    assert result.stderr.startswith("Error: The model ")
    assert result.stdout == ""


def test_list_shows_each_entry(run, converted):
    out = run("cache", "list").stdout
    assert re.search(rf"^{converted['key']} .* float16 .* sound$", out, re.MULTILINE)


def test_list_as_json_is_what_convert_says(run, converted):
    (found,) = json.loads(run("cache", "list", "--json").stdout)
    del converted["seconds"]
    assert found == {**converted, "error": None}


def test_list_of_nothing_prints_no_data(run):
    result = run("cache", "list")
    assert result.stdout == ""
    assert "No converted weights" in result.stderr


@pytest.mark.parametrize("name", ["entry.json", "config.json"])
def test_list_shows_damage(run, converted, tmp_path, name):
    (tmp_path / "models" / converted["key"] / name).write_text("")
    assert re.search(r" damaged$", run("cache", "list").stdout, re.MULTILINE)
    (found,) = json.loads(run("cache", "list", "--json").stdout)
    assert name in found["error"]


def test_verify_finds_sound_entries_sound(run, converted):
    assert run("cache", "verify").stdout == f"{converted['key']} sound\n"


def test_verify_names_a_damaged_file(run, converted, tmp_path):
    flip_the_last_byte(tmp_path / "models" / converted["key"] / "model.safetensors")
    result = run("cache", "verify", converted["key"][:6], code=1)
    assert result.stdout == f"{converted['key']} damaged\n"
    assert "model.safetensors has changed" in result.stderr
    assert f"mlx-bucket cache remove {converted['key']}" in result.stderr


@pytest.mark.parametrize("name", ["entry.json", "config.json"])
def test_an_entry_that_cannot_be_read_is_damaged_and_can_be_removed(run, converted, tmp_path, name):
    path = tmp_path / "models" / converted["key"] / name
    path.unlink()
    path.symlink_to(name)  # to itself
    assert re.search(r" damaged$", run("cache", "list").stdout, re.MULTILINE)
    assert "symbolic links" in run("cache", "verify", code=1).stderr
    assert run("cache", "remove", "--all").stdout == f"{converted['key']} removed\n"


@pytest.mark.parametrize("command", [("verify",), ("remove", "--all")], ids=str)
def test_an_empty_cache_is_said_to_be_empty(run, command):
    result = run("cache", *command)
    assert result.stdout == ""
    assert "No converted weights" in result.stderr


@pytest.mark.parametrize("command", ["verify", "remove"])
def test_an_empty_key_ends_with_2(run, converted, command):
    assert "key is empty" in run("cache", command, "", code=2).stderr
    assert json.loads(run("cache", "list", "--json").stdout)[0]["key"] == converted["key"]


def test_remove_takes_the_beginning_of_a_key(run, converted):
    assert run("cache", "remove", converted["key"][:6]).stdout == f"{converted['key']} removed\n"
    assert run("cache", "list").stdout == ""


def test_remove_all_removes_damaged_entries_too(run, converted, tmp_path):
    (tmp_path / "models" / converted["key"] / "entry.json").unlink()
    run("cache", "remove", "--all")
    assert run("cache", "list").stdout == ""


@pytest.mark.parametrize("arguments", [(), ("abc", "--all"), ("abc",)], ids=str)
def test_remove_without_one_clear_key_ends_with_2(run, arguments):
    run("cache", "remove", *arguments, code=2)
