"""A wire to a coordinator that breaks: some connections are cut after so many bytes."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from urllib.parse import urlparse


class Cutting:
    """Passes bytes on to `target`. Each of `cuts` breaks one connection: the first that has carried so many bytes to
    the coordinator (`up`) or from it (`down`)."""

    def __init__(self, target: str, *, up: list[int] | None = None, down: list[int] | None = None) -> None:
        address = urlparse(target)
        self._target = (str(address.hostname), address.port or 80)
        self._cuts = {"up": list(up or ()), "down": list(down or ())}
        self.carried = {"up": 0, "down": 0}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._closing = False

    @property
    def cuts_left(self) -> int:
        return sum(len(cuts) for cuts in self._cuts.values())

    def __enter__(self) -> Cutting:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._carry, args=(source, sink, way), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        carried = 0
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._lock:
                    carried += len(data)
                    self.carried[way] += len(data)
                    if self._cuts[way] and carried >= self._cuts[way][0]:
                        self._cuts[way].pop(0)
                        break
        except OSError:
            carried = 0  # the other way was cut
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it is gone already
