"""A gateway before one server of a deployment, which hides a metric or demands a key, as gateways do."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "host", "keep-alive", "server", "date")


@contextlib.contextmanager
def gateway(
    url: str,
    *,
    demands: Mapping[str, str] | None = None,
    only: str = "",
    without: str = "",
    pages: Mapping[str, str] | None = None,
    redirects: Mapping[str, str] | None = None,
    seen: list[tuple[str, dict[str, str]]] | None = None,
) -> Iterator[str]:
    """The address of a gateway to the server at `url`.

    `demands`: headers without which it answers 401 to all paths that begin with `only`. `without`: no line of
    /metrics that has this text is passed on. `pages`: path -> what it answers itself; "" is 404.
    `redirects`: path -> address to which it sends clients. `seen`: each request is appended, path and
    headers.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, code: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(code)
            for name, value in (headers or {}).items():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if seen is not None:
                seen.append((self.path, dict(self.headers.items())))
            lacks = any(self.headers.get(name) != value for name, value in (demands or {}).items())
            if lacks and self.path.startswith(only):
                return self.answer(401, b'{"error": "Unauthorized"}')
            if there := (redirects or {}).get(self.path):
                return self.answer(302, b"", {"Location": there})
            if (page := (pages or {}).get(self.path)) is not None:
                return self.answer(200 if page else 404, page.encode())
            with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)) as server:
                passed = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
                server.request(self.command, self.path, body, passed)
                answer = server.getresponse()
                found = answer.read()
            if without and self.path == "/metrics":
                found = b"".join(line for line in found.splitlines(True) if without.encode() not in line)
            return self.answer(answer.status, found, dict(answer.getheaders()))

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: it is not the output of a test."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
