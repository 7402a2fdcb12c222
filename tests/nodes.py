"""Two nodes on one machine: network namespaces, each with its own address and loopback, and a cable between them.

The nodes share the file system, the cores, and /dev/shm unless a process gets its own. Run as a script, this file holds
the namespaces and reads lines such as `1 down` from its standard input. It needs no program and no package, only the
right to make namespaces: that of root, or a kernel that gives it to users.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

INTERFACE = "eth0"  # the same name on both nodes
ADDRESSES = ("10.0.0.1", "10.0.0.2")
# From sched.h and mount.h.
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
# From ioctls.h and if.h.
SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x8914, 0x8916, 1
# From netlink.h, rtnetlink.h, if_link.h and veth.h.
RTM_NEWLINK = 16
NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
IFLA_IFNAME, IFLA_LINKINFO, IFLA_NET_NS_FD = 3, 18, 28
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
NO_LINK = bytes(16)  # an ifinfomsg without values: which interface it is, its attributes say
NLMSGHDR = "IHHII"  # the header of a netlink message: length, type, flags, sequence number, port

libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Node:
    """One of two nodes."""

    number: int
    address: str
    holder: subprocess.Popen
    namespaces: list[int]  # descriptors: the user namespace, where there is one, and the network namespace

    def enter(self, own_memory: bool = False) -> None:
        """Move this process, which has one thread, to this node. own_memory: with a /dev/shm of its own."""
        for descriptor in self.namespaces:
            check(libc.setns(descriptor, 0))
        if own_memory:
            check(libc.unshare(CLONE_NEWNS))
            check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
            check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None))

    def start(self, command: list, own_memory: bool = False, **settings) -> subprocess.Popen:
        """Start a process on this node."""
        return subprocess.Popen(list(map(str, command)), preexec_fn=partial(self.enter, own_memory), **settings)

    def cable(self, state: str) -> None:
        """Take this node's interface "down" or "up". While it is down, packets are lost and no connection is closed."""
        self.holder.stdin.write(f"{self.number} {state}\n")
        self.holder.stdin.flush()
        assert self.holder.stdout.readline() == "done\n"


@contextlib.contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """The nodes, as long as the block lasts. Raises OSError where this machine doesn't allow them."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True) as holder:
        # Without an answer the holder has ended, and its traceback stands above.
        answer = json.loads(holder.stdout.readline())
        if "refused" in answer:
            raise OSError(*answer["refused"])
        with contextlib.ExitStack() as stack:
            stack.callback(holder.kill)  # the kernel removes namespaces that have no process
            nodes = []
            for number, paths in enumerate(answer["nodes"]):
                namespaces = []
                for path in paths:
                    namespaces.append(os.open(f"/proc/{holder.pid}/{path}", os.O_RDONLY))
                    stack.callback(os.close, namespaces[-1])
                nodes.append(Node(number, ADDRESSES[number], holder, namespaces))
            yield nodes


def check(result: int) -> None:
    """Raises OSError if a call of libc has failed."""
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def hold() -> None:
    """Make both nodes, print the paths of their namespaces, and read orders until standard input closes."""
    try:
        user = new_user()
        namespaces, controls = [], []
        for _ in ADDRESSES:
            check(libc.unshare(CLONE_NEWNET))
            namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
            # A socket stays in the namespace that it was made in.
            controls.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        connect(namespaces[0])  # this process is in the other node's namespace, which it made last
        for control, address in zip(controls, ADDRESSES):
            # A struct ifreq: the interface's name, then a sockaddr_in with port 0, then padding.
            request = struct.pack("16sHH4s16x", INTERFACE.encode(), socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(control, SIOCSIFADDR, request)
            switch(control, "lo", IFF_UP)
            switch(control, INTERFACE, IFF_UP)
    except OSError as error:
        print(json.dumps({"refused": [error.errno, error.strerror]}), flush=True)
        return
    print(json.dumps({"nodes": [[*user, f"fd/{namespace}"] for namespace in namespaces]}), flush=True)
    for line in sys.stdin:
        number, state = line.split()
        switch(controls[int(number)], INTERFACE, IFF_UP if state == "up" else 0)
        print("done", flush=True)


def new_user() -> list[str]:
    """Become a user who may make network namespaces. Returns the path of the user namespace, or [] without one.

    Root makes a network namespace at once. Anyone else first needs a user namespace, in which they are root.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        check(libc.unshare(CLONE_NEWNET))  # whether that is allowed; hold() makes the nodes' own
        return []
    except PermissionError:
        check(libc.unshare(CLONE_NEWUSER))
    write("/proc/self/setgroups", "deny")  # without it only root may write the next line
    write("/proc/self/gid_map", f"{group} {group} 1")
    write("/proc/self/uid_map", f"{user} {user} 1")
    return ["ns/user"]


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def connect(other: int) -> None:
    """Put a pair of virtual interfaces between this namespace and another one."""
    peer = NO_LINK + attribute(IFLA_IFNAME, INTERFACE.encode()) + attribute(IFLA_NET_NS_FD, struct.pack("I", other))
    kind = attribute(IFLA_INFO_KIND, b"veth")
    kind += attribute(IFLA_INFO_DATA, attribute(VETH_INFO_PEER, peer))
    body = NO_LINK + attribute(IFLA_IFNAME, INTERFACE.encode()) + attribute(IFLA_LINKINFO, kind)
    flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        header_bytes = struct.calcsize(NLMSGHDR)
        kernel.send(struct.pack(NLMSGHDR, header_bytes + len(body), RTM_NEWLINK, flags, 1, 0) + body)
        # The answer is a header and, behind it, an error number: 0, or a negative one.
        (error,) = struct.unpack_from("i", kernel.recv(4096), header_bytes)
    if error:
        raise OSError(-error, os.strerror(-error))


def attribute(kind: int, value: bytes) -> bytes:
    """A netlink attribute: length, kind and value, padded to four bytes."""
    return struct.pack("HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def switch(control: socket.socket, interface: str, flags: int) -> None:
    """Set an interface's flags, in the namespace of the socket: IFF_UP, or 0 for down."""
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", interface.encode(), flags))


if __name__ == "__main__":
    hold()
