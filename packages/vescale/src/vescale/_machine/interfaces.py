"""Network interfaces: which there are, which are up, and which one is probably meant for training."""

from __future__ import annotations

import fcntl
import socket
import struct

_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915  # ioctls of a socket (netdevice(7)): SIOCGIFFLAGS, SIOCGIFADDR
_UP = 1
_NAME_BYTES = 15
_OF_CONTAINERS = ("lo", "docker", "br-", "veth", "virbr")


def names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def is_up(name: str) -> bool:
    """True if an interface is switched on; also if the system does not say."""
    answer = _asked(name, _GET_FLAGS)
    return answer is None or bool(struct.unpack("H", answer[16:18])[0] & _UP)


def has_address(name: str) -> bool:
    """True if it has an IPv4 address."""
    return _asked(name, _GET_ADDRESS) is not None


def _asked(name: str, request: int) -> bytes | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:_NAME_BYTES]))
    except OSError:
        return None


def likely() -> str:
    """The first that is up and has an address, or else is up, and is neither loopback nor a bridge of containers."""
    usable = [name for name in names() if is_up(name) and not name.startswith(_OF_CONTAINERS)]
    return next((name for name in usable if has_address(name)), usable[0] if usable else "lo")


def listed() -> str:
    """All of them, in words."""
    return ", ".join(name if is_up(name) else f"{name} (down)" for name in names())
