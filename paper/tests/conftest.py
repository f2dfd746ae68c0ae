"""Fast figures, and a local web server that can simulate failures."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from matplotlib.figure import Figure

from smoothhess.view.figures import canvas
from tests.view.pictures import without_layout


@pytest.fixture(scope="module")
def plain_figures():
    """Coarse figures without a layout engine: these take most of the time and change no number."""
    savefig = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "new_figure", without_layout)
        patch.setattr(Figure, "savefig", lambda self, *where, **options: savefig(self, *where, **options | {"dpi": 40}))
        yield


class Server(ThreadingHTTPServer):
    files: dict[str, bytes]
    ranges: bool
    cut_at: int | None
    requests: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self):
        body = self.server.files.get(self.path.lstrip("/"))
        asked = self.headers.get("Range")
        self.server.requests.append(asked)
        if body is None:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        if start and start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : self.server.cut_at])

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    server = Server(("127.0.0.1", 0), Handler)
    server.files, server.ranges, server.cut_at, server.requests = {}, True, None, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def serve(server):
    def address_of(files):
        server.files = files
        return f"http://127.0.0.1:{server.server_port}/"

    return address_of


@pytest.fixture
def md5():
    return lambda content: hashlib.md5(content, usedforsecurity=False).hexdigest()
