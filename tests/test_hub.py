"""Claims about the hub, with huggingface_hub and a small hub of our own on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

from mlx_bucket.errors import SourceError
from mlx_bucket.sources import resolve
from tests.tiny_folders import WEIGHTS, edit_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {
    "owner/gated": (403, "GatedRepo"),
    "owner/private": (401, "RepoNotFound"),
    "owner/broken": (500, ""),
}


class Hub(BaseHTTPRequestHandler):
    """Answers what huggingface_hub asks about ``owner/model``, whose files lie in ``folder``."""

    folder: Path
    asked: list[str]

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        path = urlsplit(self.path).path.strip("/")
        self.asked.append(path)
        for repository, (status, code) in REFUSALS.items():
            if repository in path:
                return self.reply(status, b"", {"X-Error-Code": code}, body)
        if path.startswith("api/") and "absent" in path:
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        if path.startswith("api/models/owner/model/tree/"):
            return self.reply(200, json.dumps(self.tree()).encode(), {}, body)
        if path.startswith("api/models/owner/model"):
            files = [{"rfilename": f["path"], "size": f["size"]} for f in self.tree()]
            info = {"id": "owner/model", "sha": COMMIT, "siblings": files}
            return self.reply(200, json.dumps(info).encode(), {}, body)
        content = (self.folder / path.rpartition("/")[2]).read_bytes()
        etag = f'"{abs(hash(content)):040x}"'
        return self.reply(200, content, {"X-Repo-Commit": COMMIT, "ETag": etag}, body)

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name}
            for path in sorted(self.folder.iterdir())
        ]

    def reply(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tiny_model_folder, tmp_path, monkeypatch) -> Iterator[type[Hub]]:
    """The hub, the only one that huggingface_hub knows, and an empty cache."""
    handler = type("TestHub", (Hub,), {"folder": tiny_model_folder("qwen2"), "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_hub_model_is_fetched_and_named_by_its_commit(hub):
    source = resolve("owner/model")
    assert (source.kind, source.identity) == ("hub", f"hub owner/model {COMMIT}")
    assert (source.path / WEIGHTS).read_bytes() == (hub.folder / WEIGHTS).read_bytes()


def test_only_config_tokenizer_and_safetensors_are_fetched(hub):
    for name in ("pytorch_model.bin", "modeling_own.py", "README.md", "consolidated.safetensors"):
        (hub.folder / name).write_text("never fetched")
    fetched = {path.name for path in resolve("owner/model").path.iterdir()}
    wanted = {WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert wanted <= fetched <= wanted | {"generation_config.json", "chat_template.jinja"}


def test_without_weights_none_is_asked_for(hub):
    resolve("owner/model", weights=False)
    assert not any(path.endswith(".safetensors") for path in hub.asked)


def test_the_config_is_judged_before_weights_are_fetched(hub):
    edit_config(hub.folder, lambda config: config.update(model_type="mamba2"))
    with pytest.raises(SourceError, match="of type 'mamba2'"):
        resolve("owner/model")
    assert not any(path.endswith(".safetensors") for path in hub.asked)


def test_a_fetched_model_needs_no_hub(hub, monkeypatch):
    source = resolve("owner/model")
    offline(monkeypatch)
    hub.asked.clear()
    assert resolve("owner/model") == source
    assert hub.asked == []


def test_weights_that_are_here_are_not_fetched_again(hub):
    resolve("owner/model")
    hub.asked.clear()
    resolve("owner/model")
    assert not any(path.endswith(".safetensors") for path in hub.asked)


def test_shards_are_fetched(hub, tiny_model_folder):
    hub.folder = tiny_model_folder("llama", shard_size="100KB")
    assert len(list(resolve("owner/model").path.glob("model-*.safetensors"))) > 2


def test_a_repository_of_pickles_is_refused_by_name(hub):
    shutil.move(hub.folder / WEIGHTS, hub.folder / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"only as a pickle \(pytorch_model\.bin\)"):
        resolve("owner/model")


def test_a_repository_without_weights_is_refused(hub):
    (hub.folder / WEIGHTS).unlink()
    with pytest.raises(SourceError, match=r"in no file named model\*\.safetensors"):
        resolve("owner/model")


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("owner/gated", None, "is gated: accept its terms on its page, and set HF_TOKEN"),
        ("owner/private", None, r"no preset, folder, \.gguf file or public hub model .*HF_TOKEN"),
        ("owner/broken", None, "could not be fetched|cannot be reached"),
        ("owner/model", "absent", "has no revision absent"),
        (
            "not/a/name",
            None,
            r"no preset, folder, \.gguf file or public hub model named not/a/name",
        ),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_model_that_cannot_be_had_is_refused_with_the_way_out(name, revision, words):
    with pytest.raises(SourceError, match=words):
        resolve(name, revision=revision)


def test_offline_a_model_that_is_not_here_is_refused(hub, monkeypatch):
    offline(monkeypatch)
    with pytest.raises(SourceError, match=r"is not on this machine .*HF_HUB_OFFLINE"):
        resolve("owner/model")
    assert hub.asked == []


def test_offline_weights_that_are_not_here_are_refused(hub, monkeypatch):
    resolve("owner/model", weights=False)
    offline(monkeypatch)
    with pytest.raises(SourceError, match=r"is not on this machine .*HF_HUB_OFFLINE"):
        resolve("owner/model")
    assert hub.asked


def test_a_hub_out_of_reach_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceError, match="the hub cannot be reached"):
        resolve("qwen2.5-0.5b")
