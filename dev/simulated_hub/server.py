"""The HTTP side: routes, errors and headers as the hub's own."""

from __future__ import annotations

import base64
import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import PurePosixPath
from urllib.parse import parse_qs, quote, unquote, urlsplit

from dev.simulated_hub.hub import LARGE, Hub, digest_of, read

REPO = r"/api/(?P<kind>model|dataset)s/(?P<name>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES = {
    "info": rf"{REPO}(/revision/{REVISION})?",
    "tree": rf"{REPO}/tree/{REVISION}(/(?P<path>.+))?",
    "paths_info": rf"{REPO}/paths-info/{REVISION}",
    "preupload": rf"{REPO}/preupload/{REVISION}",
    "commit": rf"{REPO}/commit/{REVISION}",
    "resolve": rf"(/(?P<kind>dataset)s)?/(?P<name>[^/]+/[^/]+)/resolve/{REVISION}/(?P<path>.+)",
}


class Refused(Exception):
    """Status, X-Error-Code and X-Error-Message of an answer."""


class Handler(BaseHTTPRequestHandler):
    """One connection; ``hub`` is set on the class."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a request of any method."""
        self.hub.asked.append((self.command, self.path))
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length).decode() if length else ""
        address = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        try:
            if address.path.startswith("/cdn/"):
                return self.cdn(address.path.removeprefix("/cdn/"))
            if address.path == "/api/repos/create":
                return self.create()
            if address.path == "/api/validate-yaml":  # a card's head
                return self.answer(200, {"errors": [], "warnings": []})
            for name, pattern in ROUTES.items():
                match = re.fullmatch(pattern, address.path)
                if match:
                    return self.route(name, **match.groupdict())
            raise Refused(404, "NotFound", "Sorry, we can't find the page you are looking for.")
        except Refused as refused:
            status, code, message = refused.args
            self.answer(
                status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message}
            )
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def route(self, route: str, kind: str | None, name: str, revision="main", path="") -> None:
        """Find the repository's revision and hand over; errors are worded as the hub words them."""
        name = ("datasets/" if kind == "dataset" else "") + name
        if not any(key.partition("@")[0] == name for key in self.hub.files):
            raise Refused(401, "RepoNotFound", "Repository not found")
        if name in self.hub.gated and route == "resolve" and "Authorization" not in self.headers:
            raise Refused(401, "GatedRepo", f"Access to {name} is restricted. Please log in.")
        match = self.hub.revision(name, unquote(revision or "main"))
        if match is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {unquote(revision)}")
        commit, files = match
        getattr(self, route)(name, commit, files, unquote(path or ""))

    def create(self) -> None:
        """A new, empty repository of the token's owner, who is ``me``."""
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        self.hub.files.setdefault(f"{name}@main", {})
        self.answer(200, {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name})

    def preupload(self, name: str, commit: str, files: dict, path: str) -> None:
        """Every file is to come within the commit, as small ones do on the hub."""
        wanted = [file["path"] for file in json.loads(self.body)["files"]]
        small = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
        self.answer(200, {"files": [{"path": path} | small for path in wanted]})

    def commit(self, name: str, commit: str, files: dict, path: str) -> None:
        """Take the files of a commit, a line of JSON each."""
        for line in map(json.loads, self.body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{self.hub.endpoint}/{name}/commit/{'1' * 40}"
        self.answer(200, {"success": True, "commitOid": "1" * 40, "commitUrl": url})

    def info(self, name: str, commit: str, files: dict, path: str) -> None:
        """A repository's card."""
        bare = name.removeprefix("datasets/")
        card = {"_id": commit[:24], "id": bare, "modelId": bare, "sha": commit, "tags": []}
        card |= {"private": False, "disabled": False, "downloads": 0, "likes": 0}
        card["gated"] = "auto" if name in self.hub.gated else False
        self.answer(200, card | {"siblings": [{"rfilename": path} for path in files]})

    def tree(self, name: str, commit: str, files: dict, path: str) -> None:
        """Files and folders below a folder."""
        prefix = f"{path}/" if path else ""
        if prefix and not any(file.startswith(prefix) for file in files):
            raise Refused(404, "EntryNotFound", f"{path} does not exist on this revision")
        recursive = self.query.get("recursive", "").lower() == "true"
        below = [place for place in places(files) if place.startswith(prefix)]
        below = [place for place in below if recursive or "/" not in place.removeprefix(prefix)]
        self.answer(200, [entry(place, files) for place in below])

    def paths_info(self, name: str, commit: str, files: dict, path: str) -> None:
        """What is known of the paths asked for; those that are not there are left out."""
        is_json = self.body.startswith("{")
        wanted = (json.loads if is_json else parse_qs)(self.body)["paths"]
        self.answer(200, [entry(place, files) for place in wanted if place in places(files)])

    def resolve(self, name: str, commit: str, files: dict, path: str) -> None:
        """A file: small ones here, large ones by a redirect to the CDN."""
        if path not in files:
            raise Refused(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit}
        digest = digest_of(path, files[path])
        if not path.endswith(LARGE):
            return self.download(path, read(files[path]), headers | {"ETag": f'"{digest}"'})
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(read(files[path])))}
        self.redirect(302, f"{self.hub.cdn}/{digest}?name={quote(path)}", headers | linked)

    def cdn(self, digest: str) -> None:
        """A large file by its hash."""
        path = self.query["name"]
        contents = (files[path] for files in self.hub.files.values() if path in files)
        data = next(read(content) for content in contents if digest_of(path, content) == digest)
        self.download(path, data, {"ETag": f'"{digest}"'})

    def download(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        """The bytes of the range asked for; cut off where the hub is told to."""
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)|", self.headers.get("Range", "")).groups(
            default=""
        )
        begin = int(first or 0)
        end = min(int(last or len(data)) + bool(last), len(data))
        headers = headers | {"Content-Length": str(end - begin), "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self.start(206 if first else 200, headers | {"Content-Type": "application/octet-stream"})
        if self.command == "HEAD":
            return
        stop = min(end, self.hub.cut.get(path, end))
        self.wfile.write(data[begin:stop])
        self.close_connection |= stop < end

    def redirect(self, status: int, address: str, headers: dict[str, str] | None = None) -> None:
        """Say where it is instead."""
        self.start(status, (headers or {}) | {"Location": address, "Content-Length": "0"})

    def answer(self, status: int, content, headers: dict[str, str] | None = None) -> None:
        """A JSON answer."""
        data = json.dumps(content).encode()
        kind = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        self.start(status, (headers or {}) | kind)
        if self.command != "HEAD":
            self.wfile.write(data)

    def start(self, status: int, headers: dict[str, str]) -> None:
        """Status line and headers."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments) -> None:
        """Nothing on stderr; ``hub.asked`` has it."""


def places(files: dict) -> list[str]:
    """All files and the folders that hold them."""
    folders = {str(folder) for file in files for folder in PurePosixPath(file).parents} - {"."}
    return sorted({*files, *folders})


def entry(place: str, files: dict) -> dict:
    """A line of a file listing."""
    if place not in files:
        return {"type": "directory", "path": place, "oid": "0" * 40, "size": 0}
    size = len(read(files[place]))
    digest = digest_of(place, files[place])
    line = {"type": "file", "path": place, "size": size, "oid": digest[:40]}
    if place.endswith(LARGE):
        line["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
    return line
