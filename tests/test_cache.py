"""Claims about the weight cache: whole entries or none, one per recipe, damage found and named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import pytest

from mlx_bucket import cache
from mlx_bucket.cache import MANIFEST, PARTIAL, REQUIRED, Quantisation, Recipe
from mlx_bucket.errors import UsageError, WeightsError
from mlx_bucket.sources import resolve
from mlx_bucket.weights import convert, load

RECIPE = Recipe("name", "folder", "identity", "float16")
MANY = Path(__file__).with_name("many_conversions.py")
needs_fork = pytest.mark.skipif(sys.platform == "darwin", reason="forks after importing MLX")


def fill(folder: Path) -> None:
    for name in REQUIRED:
        (folder / name).write_text("{}")
    (folder / "weights").write_bytes(bytes(range(256)) * 100_000)


def many(command: str, folder: Path, root: Path, count: int) -> list[str]:
    """Run ``many_conversions`` and give the lines that it prints."""
    arguments = [sys.executable, str(MANY), command, str(folder), str(root), str(count)]
    environment = {**os.environ, "PYTHONPATH": str(MANY.parent.parent)}
    run = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


@pytest.fixture
def entry(tmp_path):
    return cache.build(RECIPE, tmp_path, fill)


def test_an_entry_is_found_again(entry, tmp_path):
    assert cache.find(RECIPE.key, tmp_path) == entry
    assert cache.read_entry(entry.key, tmp_path) == entry
    assert cache.keys(tmp_path) == [entry.key]
    assert entry.size == 25_600_006


@pytest.mark.parametrize(
    "change",
    [
        {"identity": "other"},
        {"dtype": "float32"},
        {"quantisation": Quantisation(4, 64)},
        {"quantisation": Quantisation(4, 32)},
    ],
    ids=str,
)
def test_what_changes_the_weights_changes_the_key(change):
    assert replace(RECIPE, **change).key != RECIPE.key


def test_the_name_that_a_user_typed_does_not_change_the_key():
    assert replace(RECIPE, name="other", kind="hub").key == RECIPE.key


def test_an_empty_cache_has_no_entries(tmp_path):
    assert cache.keys(tmp_path / "absent") == []
    assert cache.find(RECIPE.key, tmp_path / "absent") is None


def test_the_environment_says_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_BUCKET_CACHE", str(tmp_path))
    assert cache.cache_root() == tmp_path
    monkeypatch.delenv("MLX_BUCKET_CACHE")
    assert cache.cache_root().name == "mlx-bucket"


@pytest.mark.parametrize(
    ("place", "words"),
    [("~nosuchuser/x", "of a user who is not known here"), (b"/tmp/caf\xe9", "is not UTF-8")],
    ids=str,
)
def test_a_cache_folder_that_cannot_be_is_refused(monkeypatch, place, words):
    monkeypatch.setenv("MLX_BUCKET_CACHE", os.fsdecode(place))
    with pytest.raises(WeightsError, match=rf"{words}.*MLX_BUCKET_CACHE"):
        cache.cache_root()


def test_only_names_that_are_keys_are_entries(entry, tmp_path):
    for stray in ("notes", entry.key.upper(), f"{entry.key}.old", ".DS_Store"):
        (tmp_path / "models" / stray).mkdir(exist_ok=True)
    assert cache.keys(tmp_path) == [entry.key]


def test_a_file_in_the_place_of_an_entry_is_named_and_can_be_removed(entry, tmp_path):
    shutil.rmtree(entry.path)
    entry.path.touch()
    with pytest.raises(WeightsError, match=rf"{entry.key}.*Not a directory.*cache remove"):
        cache.find(entry.key, tmp_path)
    cache.remove(entry.key, tmp_path)
    assert cache.keys(tmp_path) == []


def test_a_failed_conversion_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        fill(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.build(RECIPE, tmp_path, fail)
    assert list((tmp_path / "models").iterdir()) == []


def test_leftovers_of_dead_processes_are_removed(tmp_path):
    other = replace(RECIPE, identity="other")
    for recipe in (RECIPE, other):
        (tmp_path / "models" / f"{PARTIAL}{recipe.key}-0").mkdir(parents=True)
    made = cache.build(RECIPE, tmp_path, fill)
    assert list((tmp_path / "models").iterdir()) == [made.path]


def test_a_conversion_that_goes_on_is_no_leftover(tmp_path):
    def fill_meanwhile(folder: Path) -> None:
        cache.build(replace(RECIPE, identity="other"), tmp_path, fill)
        assert folder.is_dir()
        fill(folder)

    cache.build(RECIPE, tmp_path, fill_meanwhile)
    assert len(cache.keys(tmp_path)) == 2


@needs_fork
def test_sixteen_processes_make_one_valid_entry(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("qwen2")
    (codes,) = many("race", folder, tmp_path, 16)
    assert json.loads(codes) == [0] * 16
    (key,) = cache.keys(tmp_path)
    cache.verify(cache.read_entry(key, tmp_path))
    assert [path.name for path in (tmp_path / "models").iterdir()] == [key]


@needs_fork
def test_a_killed_conversion_leaves_no_visible_entry(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("qwen2", vocab_size=50_000)
    seen = [json.loads(line) for line in many("kill", folder, tmp_path, 20)]
    assert sum(step["killed"] and step["partial"] > 0 for step in seen) >= 5
    for step in seen:
        assert len(step["keys"]) <= 1
        if step["keys"]:  # renamed before the kill: then it is whole
            cache.verify(cache.read_entry(step["keys"][0], tmp_path))
    made = convert(resolve(str(folder)), cache=tmp_path)
    cache.verify(made)
    assert list((tmp_path / "models").iterdir()) == [made.path]


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_byte(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def loop(path):
    path.unlink()
    path.symlink_to(path.name)


def make_a_folder(path):
    path.unlink()
    path.mkdir()


def make_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, "has 25,599,999 bytes instead of 25,600,000"),
        (lambda path: flip_a_byte(path, 9), "has changed since it was written"),
        (Path.unlink, "is missing"),
        (loop, r"cannot be read \(Too many levels of symbolic links\)"),
        (make_a_folder, "has [0-9,]+ bytes instead of 25,600,000"),
        (make_a_pipe, "has 0 bytes instead of 25,600,000"),
    ],
    ids=["cut", "flipped", "missing", "loop", "folder", "pipe"],
)
def test_damage_is_found_at_every_load(entry, tmp_path, damage, words):
    damage(entry.path / "weights")
    command = f"run `mlx-bucket cache remove {entry.key}` and convert the model again"
    with pytest.raises(WeightsError, match=f"{entry.path / 'weights'} {words}; {command}"):
        cache.find(entry.key, tmp_path)


def test_a_byte_flipped_deep_in_a_file_is_found_by_verify(entry):
    flip_a_byte(entry.path / "weights", -1)
    cache.check(entry)
    with pytest.raises(WeightsError, match="weights has changed since it was written"):
        cache.verify(entry)


@pytest.mark.parametrize("damage", [loop, make_a_folder])
def test_a_manifest_that_cannot_be_read_is_named(entry, tmp_path, damage):
    damage(entry.path / MANIFEST)
    with pytest.raises(WeightsError, match=rf"{MANIFEST} cannot be read \(.+\); run"):
        cache.read_entry(entry.key, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": {**asdict(RECIPE), "name": 1}},
        {"files": {"config.json": {"size": "2", "sha256": "", "head_sha256": ""}}},
        {"files": {"config.json": {"size": 2, "sha256": None, "head_sha256": ""}}},
        {"files": {"../config.json": {"size": 2, "sha256": "", "head_sha256": ""}}},
        {"files": {"\ud800": {"size": 2, "sha256": "", "head_sha256": ""}}},
        {"files": []},
        {"created": None},
    ],
    ids=str,
)
def test_a_manifest_with_a_value_of_another_kind_is_named(entry, tmp_path, change):
    manifest = json.loads((entry.path / MANIFEST).read_text())
    (entry.path / MANIFEST).write_text(json.dumps({**manifest, **change}))
    with pytest.raises(WeightsError, match=f"{MANIFEST} is not a manifest"):
        cache.read_entry(entry.key, tmp_path)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_manifest_without_a_required_file_is_named(entry, tmp_path, name):
    manifest = json.loads((entry.path / MANIFEST).read_text())
    del manifest["files"][name]
    (entry.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(WeightsError, match=f"{MANIFEST} does not name {name}"):
        cache.read_entry(entry.key, tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "null", '{"recipe": {}}', "[" * 100_000], ids=lambda text: text[:9]
)
def test_a_broken_manifest_is_named(entry, tmp_path, content):
    (entry.path / MANIFEST).write_text(content)
    with pytest.raises(WeightsError, match=f"{MANIFEST} is not a manifest"):
        cache.read_entry(entry.key, tmp_path)


def test_an_entry_of_another_version_is_named(entry, tmp_path):
    manifest = json.loads((entry.path / MANIFEST).read_text())
    (entry.path / MANIFEST).write_text(json.dumps({**manifest, "format": 0}))
    with pytest.raises(WeightsError, match="is of another version of mlx-bucket"):
        cache.read_entry(entry.key, tmp_path)


def test_a_missing_manifest_is_named(entry, tmp_path):
    (entry.path / MANIFEST).unlink()
    with pytest.raises(WeightsError, match=f"{MANIFEST} is missing"):
        cache.read_entry(entry.key, tmp_path)


def test_a_manifest_of_another_entry_is_named(entry, tmp_path):
    other = "0123456789" * 2
    entry.path.rename(tmp_path / "models" / other)
    with pytest.raises(WeightsError, match="does not belong to this entry"):
        cache.read_entry(other, tmp_path)


def test_a_flipped_header_byte_of_a_model_is_found_by_load(tiny_model_folder, tmp_path):
    entry = convert(resolve(str(tiny_model_folder("qwen2"))), cache=tmp_path)
    flip_a_byte(entry.path / "model.safetensors", 60)
    with pytest.raises(WeightsError, match=r"model\.safetensors has changed"):
        load(entry)


def test_a_damaged_entry_can_be_removed(entry, tmp_path):
    (entry.path / MANIFEST).unlink()
    assert cache.remove(entry.key, tmp_path) == entry.key
    assert list((tmp_path / "models").iterdir()) == []


def test_the_beginning_of_a_key_is_enough(entry, tmp_path):
    assert cache.full_key(entry.key[:4], tmp_path) == entry.key


@pytest.mark.usefixtures("entry")
def test_an_unknown_key_is_refused(tmp_path):
    with pytest.raises(UsageError, match="No entry has a key that begins with 'x'"):
        cache.remove("x", tmp_path)


@pytest.mark.usefixtures("entry")
def test_an_ambiguous_key_is_refused(tmp_path):
    start = cache.keys(tmp_path)[0][0]
    others = (replace(RECIPE, identity=str(number)) for number in count())
    cache.build(next(other for other in others if other.key[0] == start), tmp_path, fill)
    with pytest.raises(UsageError, match=f"2 entries have a key that begins with '{start}'"):
        cache.remove(start, tmp_path)


def test_an_empty_key_removes_nothing(entry, tmp_path):
    with pytest.raises(UsageError, match="The key is empty"):
        cache.remove("", tmp_path)
    assert cache.keys(tmp_path) == [entry.key]


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()  # a file where the cache folder should be: root may write anywhere
    with pytest.raises(WeightsError, match=r"cannot be written .* set MLX_BUCKET_CACHE"):
        cache.build(RECIPE, tmp_path / "file", fill)
