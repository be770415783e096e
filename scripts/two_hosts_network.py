#!/usr/bin/env python3
"""Two network namespaces with a cable between them (veth), for scripts/test_two_hosts.sh.

    two_hosts_network.py make FOLDER    FOLDER/east and FOLDER/west are the namespaces, for nsenter
                                        --net; wb_east has the address 10.9.8.1, wb_west 10.9.8.2
    two_hosts_network.py make-wire FOLDER  the same, but the cable is in two parts, which end in the
                                        namespace FOLDER/middle: two_hosts_wire.py carries between
    two_hosts_network.py down|up FOLDER cuts the cable, mends it
    two_hosts_network.py delete FOLDER

Speaks to the kernel itself, as not every machine has iproute2. Needs root.
"""

import contextlib
import ctypes
import fcntl
import os
import pathlib
import socket
import struct
import sys

CLONE_NEWNET = 0x40000000
MS_BIND = 4096
MNT_DETACH = 2
RTM_NEWLINK = 16
REQUEST_ACK_CREATE = 0x1 | 0x4 | 0x400 | 0x200
IFLA_IFNAME, IFLA_LINKINFO, IFLA_NET_NS_FD = 3, 18, 28
INFO_KIND, INFO_DATA, VETH_PEER = 1, 2, 1
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
IFF_UP = 1
ADDRESSES = {"east": "10.9.8.1", "west": "10.9.8.2"}

libc = ctypes.CDLL(None, use_errno=True)


def called(result, what):
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def attribute(kind, value):
    size = 4 + len(value)
    return struct.pack("=HH", size, kind) + value + b"\0" * (-size % 4)


ETHTOOL = {"rx checksums": 0x15, "checksums": 0x17, "gather": 0x19, "tso": 0x1F, "gso": 0x24}
SIOCETHTOOL = 0x8946


def interface(name, namespace):
    """An ifinfomsg and what the interface is to have."""
    empty = struct.pack("=BBHiII", 0, 0, 0, 0, 0, 0)
    return (
        empty
        + attribute(IFLA_IFNAME, name.encode() + b"\0")
        + attribute(IFLA_NET_NS_FD, struct.pack("=I", namespace))
    )


def make_cable(one, other):
    """A veth pair: of each end its name and namespace."""
    peer = attribute(VETH_PEER, interface(*other))
    info = attribute(INFO_KIND, b"veth") + attribute(INFO_DATA, peer)
    body = interface(*one) + attribute(IFLA_LINKINFO, info)
    header = struct.pack("=IHHII", 16 + len(body), RTM_NEWLINK, REQUEST_ACK_CREATE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(header + body)
        (error,) = struct.unpack_from("=i", kernel.recv(65536), 16)
    if error != 0:
        raise OSError(-error, f"making a veth pair: {os.strerror(-error)}")


def set_address(interfaces, name, request, address):
    place = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
    fcntl.ioctl(interfaces, request, struct.pack("16s16s", name.encode(), place))


def set_up(interfaces, name, up):
    asked = struct.pack("16sH22x", name.encode(), 0)
    flags = struct.unpack_from("=H", fcntl.ioctl(interfaces, SIOCGIFFLAGS, asked), 16)[0]
    flags = flags | IFF_UP if up else flags & ~IFF_UP
    fcntl.ioctl(interfaces, SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), flags))


def send_whole_frames(interfaces, name):
    """What leaves has its checksums and is no longer than the cable takes: who reads frames from
    the other end would else see what a network card has still to finish."""
    for feature in ETHTOOL.values():
        value = ctypes.create_string_buffer(struct.pack("=II", feature, 0))
        request = struct.pack("16sP16x", name.encode(), ctypes.addressof(value))
        fcntl.ioctl(interfaces, SIOCETHTOOL, request)


def in_a_child(work):
    """work() in a process of its own, whose namespaces may change."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except OSError as error:
            print(f"two_hosts_network: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(1)


def inside(path, work):
    """work(interfaces) in a namespace."""

    def there():
        with open(path, "rb") as namespace:
            called(libc.setns(namespace.fileno(), CLONE_NEWNET), "setns")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as interfaces:
            work(interfaces)

    in_a_child(there)


def make_namespace(path):
    """Bound to a file, as it has to outlive the process that made it."""

    def bound():
        called(libc.unshare(CLONE_NEWNET), "a network namespace")
        own = b"/proc/self/ns/net"
        called(libc.mount(own, bytes(path), None, MS_BIND, None), "keeping a namespace")

    path.touch()
    in_a_child(bound)


def make(folder, through_the_middle):
    names = [*ADDRESSES, "middle"] if through_the_middle else list(ADDRESSES)
    for name in names:
        make_namespace(folder / name)
    with contextlib.ExitStack() as held:
        spaces = {n: held.enter_context(open(folder / n, "rb")).fileno() for n in names}
        if through_the_middle:
            for name in ADDRESSES:
                make_cable((f"wb_{name}", spaces[name]), (f"mid_{name}", spaces["middle"]))
        else:
            make_cable(("wb_east", spaces["east"]), ("wb_west", spaces["west"]))
    for name, address in ADDRESSES.items():

        def configure(interfaces, name=name, address=address):
            set_up(interfaces, "lo", True)
            set_address(interfaces, f"wb_{name}", SIOCSIFADDR, address)
            set_address(interfaces, f"wb_{name}", SIOCSIFNETMASK, "255.255.255.0")
            if through_the_middle:
                send_whole_frames(interfaces, f"wb_{name}")
            set_up(interfaces, f"wb_{name}", True)

        inside(folder / name, configure)
    if through_the_middle:
        ends = [f"mid_{name}" for name in ADDRESSES]
        inside(folder / "middle", lambda ifs: [set_up(ifs, end, True) for end in ends])


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("make", "make-wire", "up", "down", "delete"):
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[2])
    try:
        if sys.argv[1] in ("make", "make-wire"):
            make(folder, sys.argv[1] == "make-wire")
        elif sys.argv[1] == "delete":
            for name in (*ADDRESSES, "middle"):
                libc.umount2(bytes(folder / name), MNT_DETACH)
        else:
            up = sys.argv[1] == "up"
            inside(folder / "west", lambda interfaces: set_up(interfaces, "wb_west", up))
    except OSError as error:
        sys.exit(f"two_hosts_network: {error}")


if __name__ == "__main__":
    main()
