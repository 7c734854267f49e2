"""A small task service on this machine, real down to its socket."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Answer:
    """What the service says to one request."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """What it was asked."""

    path: str
    parameters: Mapping[str, list[str]]
    authorization: str | None


GONE = Answer(410)


class Service:
    """Gives its answers one after the other, then 410 for ever. Starts at once; may stop and start again."""

    def __init__(self, *answers: Answer) -> None:
        self.asked: list[Asked] = []
        self.answers = list(answers)
        self._port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}/tasks"

    def start(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                service.asked.append(Asked(url.path, parse_qs(url.query), self.headers["Authorization"]))
                answer = service.answers.pop(0) if service.answers else GONE
                body = answer.body.encode()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.status != 204:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
