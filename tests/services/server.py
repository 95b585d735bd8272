"""A small key-value store over TCP: the service of these tests. It needs the standard library alone.

    python server.py PORT [--exit CODE] [--child] [--shared-memory NAME]

A request is a line of JSON, {"op": "put" | "get" | "has" | "clear" | "end", "key": ..., "size": bytes},
and the bytes of a put. The answer is a line of JSON, {"size": bytes, -1: there is no such key}, and the bytes
of a get.
"""

from __future__ import annotations

import argparse
import json
import os
import socketserver
import subprocess
import sys
import threading
from typing import Any

KEPT: dict[str, bytes] = {}
LOCK = threading.Lock()


class Handler(socketserver.StreamRequestHandler):
    """One connection."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            asked = json.loads(line)
            body = self.rfile.read(asked["size"]) if asked["op"] == "put" else b""
            with LOCK:
                self.answer(asked["op"], asked["key"], body)

    def answer(self, op: str, key: str, body: bytes) -> None:
        found, size = b"", 0
        if op == "put":
            KEPT.setdefault(key, body)
        elif op == "clear":
            for other in [other for other in KEPT if other.startswith(key)]:
                del KEPT[other]
        elif op == "end":
            print("asked to end", flush=True)
            os._exit(7)
        else:
            size = len(KEPT[key]) if key in KEPT else -1
            found = KEPT.get(key, b"") if op == "get" else b""
        self.wfile.write(json.dumps({"size": size}).encode() + b"\n" + found)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is no error."""


def main(arguments: Any) -> None:
    if arguments.shared_memory:
        with open(f"/dev/shm/{arguments.shared_memory}", "wb") as file:
            file.write(b"kv")
        os.open(f"/dev/shm/{arguments.shared_memory}", os.O_RDONLY)  # open while it runs
    if arguments.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    if arguments.exit is not None:
        print("the licence has expired", file=sys.stderr)
        sys.exit(arguments.exit)
    with Server(("127.0.0.1", arguments.port), Handler) as server:
        print("listening", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--exit", type=int)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--shared-memory", default="")
    main(parser.parse_args())
