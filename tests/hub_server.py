"""A hub on this machine: repositories in folders, served as the real one's client asks for them."""

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
_REPOSITORY = r"(?P<repo>[^/]+/[^/]+)"
_INFO = re.compile(rf"/api/(?P<kind>models|datasets)/{_REPOSITORY}(/revision/(?P<revision>.+))?")
_TREE = re.compile(rf"/api/(?P<kind>models|datasets)/{_REPOSITORY}/tree/(?P<revision>.+)")
_FILE = re.compile(rf"/((?P<kind>datasets)/)?{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class _Handler(BaseHTTPRequestHandler):
    root: Path
    asked: list[str]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(f"{self.command} {path}")
        found = next((m for form in (_INFO, _TREE, _FILE) if (m := form.fullmatch(path))), None)
        folder = self.root / (found["kind"] or "models") / found["repo"] if found else self.root / "none"
        if found is None or not folder.is_dir():
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if found["revision"] not in (None, "main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if found.re is _FILE:
            file = folder / found["file"]
            if not file.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return self._send(200, file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(file)}"'})
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        names = [str(file.relative_to(folder)) for file in files]
        answer: object = {"id": found["repo"], "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
        if found.re is _TREE:
            answer = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": _digest(file)}
                for name, file in zip(names, files, strict=True)
            ]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET

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
def serving(root: Path, cache: Path, monkeypatch: Any) -> Iterator[list[str]]:
    """Serve `root/models/<org>/<name>` and `root/datasets/…` as the hub, with a cache; gives what was asked."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"root": root, "asked": asked}))
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    form = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
