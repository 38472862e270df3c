#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a command on another processor than aarch64; qemu executes the programs for aarch64 that it starts, directly or not.

    emulate.py COMMAND [ARGUMENT...]

The kernel learns about qemu in a user namespace of the command (since Linux 6.7), so nothing else on the machine changes.
The namespace has all users if root starts it. KVD_TEST_EMULATED tells the tests why some of them must be skipped.
"""
import ctypes
import os
import shutil
import sys

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
FORMATS = "/proc/sys/fs/binfmt_misc"
MAGIC = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00"    # an executable file for aarch64, or ...
MASK = b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe\xff\xff\xff"    # ... a position-independent one, for any system
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) != 0:
        sys.exit(f"{name}: {os.strerror(ctypes.get_errno())}")


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def escaped(text: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text)


def map_users(pid: int) -> None:
    root = os.getuid() == 0
    if not root:
        write(f"/proc/{pid}/setgroups", "deny")
    for kind, own in ("uid", os.getuid()), ("gid", os.getgid()):
        write(f"/proc/{pid}/{kind}_map", f"0 0 {2**32 - 1}" if root else f"0 {own} 1")


def enter_namespace() -> None:
    """Another process maps the users: one within the namespace may map only its own."""
    done, entered = os.pipe()
    parent, helper = os.getpid(), os.fork()
    if helper == 0:
        os.close(entered)
        os.read(done, 1)
        map_users(parent)
        os._exit(0)
    call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    os.close(entered)
    if os.waitpid(helper, 0)[1] != 0:
        sys.exit("the users of the namespace cannot be mapped")


def main() -> None:
    qemu = shutil.which("qemu-aarch64") or sys.exit("qemu-aarch64 is not installed")
    enter_namespace()
    call("mount", b"binfmt_misc", FORMATS.encode(), b"binfmt_misc", 0, None)
    write(f"{FORMATS}/register", f":aarch64:M::{escaped(MAGIC)}:{escaped(MASK)}:{qemu}:P")
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, "KVD_TEST_EMULATED": "1"})


if __name__ == "__main__":
    main()
