"""Weights named by URL are fetched once, whole or not at all."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch

from extractors.base import Weights
from extractors.errors import WeightsError
from extractors.fetch import fetched

CONTENT = b"weights " * 1000


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/absent"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT) + 99 * self.path.startswith("/cut")))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_is_fetched_once_and_kept_under_its_name(server: str, tmp_path: Path) -> None:
    path = fetched(f"{server}/models/net.pth?download=1")
    assert path.read_bytes() == CONTENT
    assert path.name.endswith("-net.pth")
    assert path.is_relative_to(tmp_path / "cache")
    assert fetched(f"{server}/models/net.pth?download=1") == path
    assert fetched(f"{server}/other/net.pth") != path
    assert len(Handler.asked) == 2


@pytest.mark.parametrize(
    ("file", "says"), [("absent.pth", "404"), ("cut.pth", "ended 99 bytes too early")], ids=["absent", "cut"]
)
def test_what_does_not_come_whole_leaves_nothing(server: str, file: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=rf"{file} can't be fetched \(.*{says}.*give its path"):
        fetched(f"{server}/{file}")
    assert list((tmp_path / "cache" / "scenecache" / "weights").iterdir()) == []


@pytest.mark.usefixtures("server")
def test_any_url_of_fsspec_is_read_and_an_unknown_kind_is_named() -> None:
    with fsspec.open("memory://bucket/net.pth", "wb") as file:
        file.write(CONTENT)
    assert fetched("memory://bucket/net.pth").read_bytes() == CONTENT
    with pytest.raises(WeightsError, match=r"ftpx://host/net\.pth can't be fetched .*install what opens such URLs"):
        fetched("ftpx://host/net.pth")


@pytest.mark.usefixtures("server")
def test_weights_at_a_url_have_the_identity_of_their_content(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "net.pth")
    by_url, by_path = Weights(f"file://{tmp_path}/net.pth"), Weights(str(tmp_path / "net.pth"))
    assert by_url.identity() == by_path.identity()
    assert by_url.identity().startswith("sha256:")
