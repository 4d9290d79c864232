"""An HTTP server in the place of S3: it keeps objects, or answers with an error document of AWS."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4
from xml.sax.saxutils import escape

ERRORS = {
    "SignatureDoesNotMatch": (403, "The request signature we calculated does not match the signature you provided."),
    "InvalidAccessKeyId": (403, "The AWS Access Key Id you provided does not exist in our records."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "AccessDenied": (403, "Access Denied"),
    "PermanentRedirect": (301, "The bucket you are attempting to access must be addressed using another endpoint."),
    "AuthorizationHeaderMalformed": (400, "the region 'us-east-1' is wrong; expecting 'eu-central-1'"),
    "ExpiredToken": (400, "The provided token has expired."),
    "RequestTimeTooSkewed": (403, "The difference between the request time and the current time is too large."),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
}
"""The status and the message of errors by their codes, as AWS documents them."""


class S3Stub(ThreadingHTTPServer):
    """A bucket on a free port. With `code` the operations of `fails` are answered by that error."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, code: str = "", fails: str = "HEAD GET PUT POST DELETE", message: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.code = code
        self.fails = tuple(fails.split())
        self.message = message
        self.objects: dict[str, bytes] = {}

    @property
    def query(self) -> str:
        """Options of pyarrow that follow an address."""
        return f"?endpoint_override=127.0.0.1:{self.server_port}&scheme=http&region=us-east-1"

    def __enter__(self) -> S3Stub:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Answer(BaseHTTPRequestHandler):
    server: S3Stub  # pyright: ignore[reportIncompatibleVariableOverride] - as socketserver documents it
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._do()

    def do_GET(self) -> None:
        self._do()

    def do_PUT(self) -> None:
        self._do()

    def do_POST(self) -> None:
        self._do()

    def do_DELETE(self) -> None:
        self._do()

    def _do(self) -> None:
        url = urlsplit(self.path)
        query, body = parse_qs(url.query, keep_blank_values=True), self._body()
        operation = "DELETE" if "delete" in query else self.command
        if self.server.code and operation in self.server.fails:
            status, message = ERRORS[self.server.code]
            text = f"<Code>{self.server.code}</Code><Message>{escape(self.server.message or message)}</Message>"
            self._answer(status, f"<Error>{text}<RequestId>{uuid4().hex}</RequestId></Error>".encode())
        elif operation in ("PUT", "POST", "DELETE"):
            self._answer(200, self._change(operation, url.path, query, body))
        else:
            self._answer(*self._read(url.path, query))

    def _change(self, operation: str, name: str, query: dict[str, list[str]], body: bytes) -> bytes:
        """Return the answer to a request that changes objects. One of several parts has only one here."""
        if operation == "PUT":
            self.server.objects[name] = body
        elif operation == "DELETE":
            self.server.objects.clear()
            return b"<DeleteResult></DeleteResult>"
        elif "uploads" in query:
            return b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
        else:
            return b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>'
        return b""

    def _read(self, name: str, query: dict[str, list[str]]) -> tuple[int, bytes]:
        objects = self.server.objects
        if "list-type" in query:
            keys = [each.split("/", 2)[2] for each in objects if f"/{query['prefix'][0]}" in each]
            found = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
            counts = f"<IsTruncated>false</IsTruncated><KeyCount>{len(keys)}</KeyCount>"
            return 200, f"<ListBucketResult>{counts}{found}</ListBucketResult>".encode()
        if name in objects:
            return 200, objects[name]
        return 404, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>"

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            pieces: list[bytes] = []
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            body = b"".join(pieces)
        else:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
        return _decoded(body) if "aws-chunked" in self.headers.get("content-encoding", "") else body

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/xml")
        self.send_header("etag", '"x"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Write nothing."""


def _decoded(body: bytes) -> bytes:
    """Return the content of a body in chunks of AWS, whose signatures are not checked."""
    content = b""
    while body:
        head, _, rest = body.partition(b"\r\n")
        size = int(head.partition(b";")[0], 16)
        content, body = content + rest[:size], rest[size + 2 :]
        if not size:
            break
    return content
