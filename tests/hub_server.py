"""A hub on this machine: repositories in folders, served and written as the real one's client asks."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

COMMIT = "c0ffee" + 34 * "0"
TOKEN = "hf_of_these_tests_alone"
"""Who has it may write."""
READER = "hf_that_only_reads"
_REPOSITORY = r"(?P<repo>[^/]+/[^/]+)"
_INFO = re.compile(rf"/api/(?P<kind>models|datasets)/{_REPOSITORY}(/revision/(?P<revision>.+))?")
_TREE = re.compile(rf"/api/(?P<kind>models|datasets)/{_REPOSITORY}/tree/(?P<revision>.+)")
_FILE = re.compile(rf"/((?P<kind>datasets)/)?{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_CREATE, _CHECK_CARD, _WHOAMI = "/api/repos/create", "/api/validate-yaml", "/api/whoami-v2"
_BEFORE = re.compile(rf"/api/models/{_REPOSITORY}/preupload/main")
_BATCH = re.compile(rf"/{_REPOSITORY}\.git/info/lfs/objects/batch")
_OBJECT = re.compile(r"/lfs/(?P<oid>[0-9a-f]{64})")
_COMMIT = re.compile(rf"/api/models/{_REPOSITORY}/commit/main")


class _Handler(BaseHTTPRequestHandler):
    root: Path
    asked: list[str]
    full: bool = False
    """Whether it takes no more large files."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(f"{self.command} {path}")
        if path == _WHOAMI:
            role = {f"Bearer {TOKEN}": "write", f"Bearer {READER}": "read"}.get(self.headers["Authorization"])
            return self._answer({"auth": {"accessToken": {"role": role}}}, 200 if role else 401)
        match = next((m for form in (_INFO, _TREE, _FILE) if (m := form.fullmatch(path))), None)
        folder = self.root / (match["kind"] or "models") / match["repo"] if match else self.root / "none"
        if match is None or not folder.is_dir():
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if match["revision"] not in (None, "main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if match.re is _FILE:
            file = folder / match["file"]
            if not file.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return self._send(200, file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(file)}"'})
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        names = [str(file.relative_to(folder)) for file in files]
        answer: object = {
            "id": match["repo"], "sha": COMMIT, "siblings": [{"rfilename": n} for n in names],
            "private": (self.root / "private" / match["repo"]).exists(),
        }  # fmt: skip
        if match.re is _TREE:
            answer = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": _digest(file)}
                for name, file in zip(names, files, strict=True)
            ]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        may_write = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if path == _CHECK_CARD:
            return self._answer({"errors": [], "warnings": []})
        if path == _CREATE:
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            folder = self.root / "models" / repo
            if not may_write:
                return self._send(401, b"{}", {})
            status = 409 if folder.is_dir() else 200
            folder.mkdir(parents=True, exist_ok=True)
            if status == 200 and (asked.get("private") or asked.get("visibility") == "private"):
                (self.root / "private" / repo).mkdir(parents=True)
            return self._answer({"url": f"{self._address}/{repo}"}, status)
        if match := _BEFORE.fullmatch(path):
            files = [file["path"] for file in json.loads(body)["files"]]
            large = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            return self._answer(
                {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in large.items()]}
            )
        if _BATCH.fullmatch(path):
            if self.full:
                return self._send(507, b"{}", {})
            objects = json.loads(body)["objects"]
            to = [{**o, "actions": {"upload": {"href": f"{self._address}/lfs/{o['oid']}"}}} for o in objects]
            return self._answer({"transfer": "basic", "objects": to})
        if (match := _COMMIT.fullmatch(path)) and may_write:
            return self._commit(match["repo"], map(json.loads, body.splitlines()))
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        match = _OBJECT.fullmatch(self.path)
        assert match
        assert hashlib.sha256(body).hexdigest() == match["oid"]
        (self.root / "lfs").mkdir(exist_ok=True)
        (self.root / "lfs" / match["oid"]).write_bytes(body)
        self._send(200, b"", {})

    def _commit(self, repo: str, lines: Iterator[Any]) -> None:
        folder = self.root / "models" / repo
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                (folder / value["path"]).write_bytes((self.root / "lfs" / value["oid"]).read_bytes())
            elif line["key"] == "deletedFile":
                (folder / value["path"]).unlink()
        self._answer({"commitUrl": f"{self._address}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})

    @property
    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _answer(self, answer: object, status: int = 200) -> None:
        self._send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on the console."""


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def serve(root: Path, cache: Path, monkeypatch: Any, full: bool = False) -> Iterator[list[str]]:
    """Serve `root/models/<org>/<name>` and `root/datasets/…` as the hub, with a cache; gives what was asked."""
    asked: list[str] = []
    handler = type("Handler", (_Handler,), {"root": root, "asked": asked, "full": full})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    form = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def holds(folder: Path, secret: str) -> bool:
    """Whether any file there has it."""
    return any(secret.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())
