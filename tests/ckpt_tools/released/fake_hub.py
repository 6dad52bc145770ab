"""A hub on the loopback: as much of huggingface.co as listing and downloading need."""

import hashlib
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from train.model.families import FAMILIES

LARGE = (".safetensors", ".bin")  # suffixes whose hash the hub states
REPO = "allenai/OLMo-2-0425-1B"
POLL_SECONDS = 0.01  # until a server that is asked to end does


def config_json(model_type: str, **fields: object) -> bytes:
    """The configuration of a model of default sizes."""
    classes = [FAMILIES[model_type].architecture if model_type in FAMILIES else "Unknown"]
    content = {"model_type": model_type, "architectures": classes}
    return json.dumps(content | fields).encode()


def model_files(seed: int) -> dict[str, bytes]:
    """A repository's files: weights in two shards, and much that is not to be fetched."""
    generator = np.random.default_rng(seed)
    shards = {
        f"model-0000{number}-of-00002.safetensors": save(
            {f"w{number}": generator.standard_normal(20_000)}
        )
        for number in (1, 2)
    }
    index = {
        "metadata": {},
        "weight_map": {f"w{number}": name for number, name in enumerate(shards, 1)},
    }
    return {
        **shards,
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": config_json("llama"),
        "tokenizer.json": b"{}",
        "merges.txt": b"a b",
        "pytorch_model.bin": b"a pickle",
        "modeling_olmo.py": b"raise SystemExit",
        "README.md": b"# OLMo",
        "original/model.safetensors": b"another",
    }


class FakeHub(ThreadingHTTPServer):
    """Serves `revisions`, and `others` of further repositories.

    `got` lists the (revision, file) whose bytes were asked for, `asked` the path of every request.
    """

    daemon_threads = True

    def __init__(self, revisions: dict[str, dict[str, bytes]], repo: str = REPO) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo, self.revisions = repo, revisions
        self.others: dict[str, dict[str, dict[str, bytes]]] = {}
        self.got: list[tuple[str, str]] = []
        self.asked: list[str] = []
        self.stalled: str | None = None  # file of which only a half arrives
        self.reached_stall, self.let_go = threading.Event(), threading.Event()
        self.corrupted: str | None = None  # file that arrives with another byte than its hash says
        threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes huggingface_hub take it for huggingface.co."""
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            self.endpoint + template[template.index("/{") :],
        )

    def commit(self, revision: str) -> str:
        """The commit that a revision stands for."""
        return hashlib.sha1(revision.encode()).hexdigest()

    def lay_out(self, directory: Path) -> Path:
        """Writes every revision as a directory."""
        for revision, files in self.revisions.items():
            for name, content in files.items():
                path = directory / revision / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return directory


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server, urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        hub.asked.append(path)
        repo = next((other for other in hub.others if f"/{other}/" in path), hub.repo)
        revisions = hub.others.get(repo, hub.revisions)
        by_commit = {hub.commit(name): name for name in revisions}
        if path == f"/api/models/{repo}/refs":
            branches = [
                {"name": n, "ref": f"refs/heads/{n}", "targetCommit": hub.commit(n)}
                for n in revisions
            ]
            self._json({"branches": branches, "converts": [], "tags": []})
        elif path.startswith(f"/api/models/{repo}/revision/"):
            revision = path.rpartition("/")[2]
            if revision not in revisions:
                return self._error("RevisionNotFound")
            files = [_sibling(name, content) for name, content in revisions[revision].items()]
            self._json({"id": repo, "sha": hub.commit(revision), "siblings": files})
        elif path.startswith(f"/api/models/{repo}/tree/"):
            revision = by_commit[path.rpartition("/")[2]]
            self._json([_entry(name, data) for name, data in revisions[revision].items()])
        elif path.startswith(f"/{repo}/resolve/"):
            commit, _, name = path.removeprefix(f"/{repo}/resolve/").partition("/")
            self._file(revisions[by_commit[commit]], by_commit[commit], name)
        else:
            self._error("RepoNotFound")
        return None

    def _file(self, files: dict[str, bytes], revision: str, name: str) -> None:
        hub = self.server
        content = files[name]
        self.send_response(200)
        self.send_header("X-Repo-Commit", hub.commit(revision))
        self.send_header("ETag", f'"{_etag(name, content)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        hub.got.append((revision, name))
        if name == hub.stalled and not hub.let_go.is_set():
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            hub.reached_stall.set()
            hub.let_go.wait(60)
            self.close_connection = True
        else:
            last = bytes([content[-1] ^ 1]) if name == hub.corrupted else content[-1:]
            self.wfile.write(content[:-1] + last)

    def _json(self, content: object) -> None:
        payload = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _error(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(name: str, content: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": name,
        "size": len(content),
        "oid": _etag(name, content),
    }
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": _etag(name, content), "size": len(content), "pointerSize": 134}
    return entry


def _sibling(name: str, content: bytes) -> dict[str, object]:
    sibling: dict[str, object] = {
        "rfilename": name,
        "size": len(content),
        "blobId": _etag(name, content),
    }
    if name.endswith(LARGE):
        sibling["lfs"] = {"size": len(content), "sha256": _etag(name, content), "pointerSize": 134}
    return sibling
