"""HTTP as uvicorn reads it; what is no HTTP is answered by a problem document too."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coordinator.wire.problems import MEDIA_TYPE, problem_document


class ProblemProtocol(HttpToolsProtocol):
    """uvicorn's own protocol, but for the answer to bytes that cannot be read as a request."""

    def send_400_response(self, msg: str) -> None:
        """Answers with code `malformed_http` and closes the connection."""
        body = json.dumps(problem_document("malformed_http", msg)).encode()
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
