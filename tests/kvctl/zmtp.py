# SPDX-License-Identifier: Apache-2.0
"""As much of ZeroMQ's wire format (ZMTP 3.0) and msgpack as a router needs, without their libraries, to test bytes."""

from __future__ import annotations

import socket
import struct

PATIENCE = 60   # seconds; anything longer counts as hanging


class Socket:
    """A SUB or DEALER socket that is connected to one other."""

    def __init__(self, endpoint: str, kind: bytes, topic: bytes | None = None, room: int = 0) -> None:
        transport, _, where = endpoint.partition("://")
        self.socket = socket.socket(socket.AF_UNIX if transport == "ipc" else socket.AF_INET)
        self.socket.settimeout(PATIENCE)
        if room:        # bytes that the kernel keeps until they are read
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        host, _, port = where.rpartition(":")
        self.socket.connect(where if transport == "ipc" else (host, int(port)))
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        greeting = self.take(64)
        assert greeting[0] == 0xff and greeting[9] == 0x7f and greeting[10] == 3, greeting
        assert greeting[12:32] == b"NULL".ljust(20, b"\0"), greeting
        name = b"Socket-Type"
        ready = b"\x05READY" + bytes([len(name)]) + name + struct.pack(">I", len(kind)) + kind
        self.socket.sendall(bytes([4, len(ready)]) + ready)
        flags, body = self.frame()
        assert flags & 4 and body.startswith(b"\x05READY"), body
        if topic is not None:
            self.send(b"\x01" + topic)

    def take(self, n: int) -> bytes:
        got = b""
        while len(got) < n:
            piece = self.socket.recv(n - len(got))
            assert piece, "the other side has closed the connection"
            got += piece
        return got

    def frame(self) -> tuple[int, bytes]:
        flags = self.take(1)[0]
        return flags, self.take(struct.unpack(">Q", self.take(8))[0] if flags & 2 else self.take(1)[0])

    def receive(self) -> list[bytes]:
        parts, more = [], 1
        while more:
            flags, body = self.frame()
            assert not flags & 4, body
            parts.append(body)
            more = flags & 1
        return parts

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(bytes([i + 1 < len(parts), len(part)]) + part for i, part in enumerate(parts)))

    def close(self) -> None:
        self.socket.close()


def unpack(data: bytes) -> object:
    """The value that these bytes encode."""
    value, end = _unpack(data, 0)
    assert end == len(data), "bytes behind the value"
    return value


_FIXED = {0xca: ">f", 0xcb: ">d", 0xcc: ">B", 0xcd: ">H", 0xce: ">I", 0xcf: ">Q", 0xd0: ">b", 0xd1: ">h", 0xd2: ">i",
          0xd3: ">q"}
_CONSTANT = {0xc0: None, 0xc2: False, 0xc3: True}
_LENGTH = {0xd9: (">B", "str"), 0xda: (">H", "str"), 0xdb: (">I", "str"), 0xdc: (">H", "array"), 0xdd: (">I", "array"),
           0xde: (">H", "map"), 0xdf: (">I", "map")}


def _unpack(data: bytes, at: int) -> tuple[object, int]:
    first = data[at]
    if first in _CONSTANT:
        return _CONSTANT[first], at + 1
    if first < 0x80 or first >= 0xe0:
        return first - (256 if first >= 0xe0 else 0), at + 1
    if first in _FIXED:
        return struct.unpack_from(_FIXED[first], data, at + 1)[0], at + 1 + struct.calcsize(_FIXED[first])
    if first < 0xc0:
        kind, n, at = ("map", first & 15, at + 1) if first < 0x90 else \
                      ("array", first & 15, at + 1) if first < 0xa0 else ("str", first & 31, at + 1)
    else:
        form, kind = _LENGTH[first]
        n, at = struct.unpack_from(form, data, at + 1)[0], at + 1 + struct.calcsize(form)
    if kind == "str":
        return data[at:at + n].decode(), at + n
    values = []
    for _ in range(2 * n if kind == "map" else n):
        value, at = _unpack(data, at)
        values.append(value)
    return (dict(zip(values[::2], values[1::2])) if kind == "map" else values), at
