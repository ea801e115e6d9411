"""Messages between processes of one machine: what a device's links carry, in the order of each sender.

Every process listens on a socket of its own, by a name that groups exchange through their store. A message has a key,
which says all of what it is, a small value and some bytes; it is taken by its key, whenever it came.

Any user of the machine may connect to such a socket. So messages are taken from processes of this user alone, and keys
and values are tuples of texts and numbers, which are read as nothing else.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

_LENGTHS = struct.Struct(">QQ")
_CREDENTIALS = struct.Struct("=iII")


class Message(NamedTuple):
    value: Any
    payload: bytes


def _is_ours(connection: socket.socket) -> bool:
    """True if this user's process is at the other end, as the kernel tells."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)[1] == os.geteuid()


class _Peer:
    """The way to one process; what does not fit into the socket at once is left to a thread."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect("\0" + address)
        if not _is_ours(self._socket):
            raise ConnectionRefusedError(f"second: {address} is a socket of another user")
        self._left: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def send(self, *parts: bytes) -> None:
        with self._changed:
            for part in parts:
                view = memoryview(part)
                while view and not self._left:
                    try:
                        view = view[self._socket.send(view, socket.MSG_DONTWAIT) :]
                    except BlockingIOError:
                        break
                    except OSError:  # the other process has gone: who waits for it finds out
                        return
                if view:
                    self._left.append(view)
            if self._left and self._thread is None:
                self._thread = threading.Thread(target=self._drain, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _drain(self) -> None:
        while True:
            with self._changed:
                while not self._left:
                    self._changed.wait()
                view = self._left[0]
            try:
                self._socket.sendall(view)
            except OSError:
                return
            with self._changed:
                self._left.popleft()


class Wire:
    """This process's end of all messages.

    Arguments:
        arrived: called, by the thread that reads, after each message.
    """

    def __init__(self, arrived: Callable[[], None]) -> None:
        self.address = f"vescale-second-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.address)
        self._listener.listen(64)
        self._peers: dict[str, _Peer] = {}
        self._messages: dict[Any, Message] = {}
        self._lock = threading.Lock()
        self._arrived = arrived
        threading.Thread(target=self._accept, daemon=True).start()

    def send(self, address: str, key: Any, value: Any, payload: bytes = b"") -> None:
        """Sends a message; returns before it has arrived."""
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = _Peer(address)
        head = json.dumps((key, value)).encode()
        peer.send(_LENGTHS.pack(len(head), len(payload)) + head, payload)

    def has(self, key: Any) -> bool:
        return key in self._messages

    def take(self, key: Any) -> Message:
        """The message of this key, which has arrived."""
        with self._lock:
            return self._messages.pop(key)

    def look(self, key: Any) -> Message | None:
        """The message of this key, left where it is."""
        return self._messages.get(key)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb", buffering=1 << 16) as stream:
            if not _is_ours(connection):
                while stream.read1():  # a stranger is not told that nobody listens
                    pass
                return
            while len(lengths := stream.read(_LENGTHS.size)) == _LENGTHS.size:
                head, payload = _LENGTHS.unpack(lengths)
                key, value = _tuples(json.loads(stream.read(head)))
                message = Message(value, stream.read(payload))
                with self._lock:
                    self._messages[key] = message
                self._arrived()


def _tuples(read: Any) -> Any:
    """Returns what JSON gives as lists as the tuples that were sent."""
    return tuple(map(_tuples, read)) if isinstance(read, list) else read
