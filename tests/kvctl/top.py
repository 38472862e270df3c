#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvctl top at a keyboard: simulates a terminal, types keys, and checks the screen.

    top.py KVCTL [PICTURE]      a daemon with a filler's space llama is at $KVD_SOCKET

Each step waits until the screen is as expected, for a limited time. PICTURE: only prints a screen of 80x24.
"""
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time

PATIENCE = 60
KEYS = {"right": b"\033[C", "left": b"\033OD", "down": b"\033[B", "up": b"\033[A", "pgdn": b"\033[6~", "tab": b"\t"}
COLOUR = re.compile(r"\033\[[0-9;]*m")


class Terminal:
    """kvctl on a terminal."""

    def __init__(self, *command, rows=24, columns=80):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, dict(os.environ, TERM="xterm", LC_ALL="C.UTF-8"))
        self.raw = ""
        self.bytes = b""
        self.resize(rows, columns)

    def resize(self, rows, columns):
        self.rows, self.columns = rows, columns
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, *keys):
        for key in keys:
            os.write(self.fd, KEYS.get(key, key.encode()))

    def read(self):
        """False: the program has ended."""
        if not select.select([self.fd], [], [], 0.05)[0]:
            return True
        try:
            piece = os.read(self.fd, 65536)
        except OSError:
            return False
        self.bytes += piece
        self.raw = self.bytes.decode("utf-8", "ignore")
        return bool(piece)

    def pictures(self):
        return self.raw.split("\033[H\033[2J")[1:]

    def whole(self):
        """The last picture but one. It is complete; the last one may still be arriving."""
        return self.pictures()[-2] if len(self.pictures()) > 1 else ""

    @property
    def screen(self):
        return lines(self.whole())

    @property
    def still(self):
        """The last picture, while kvctl is paused and draws no other. It may still be arriving."""
        return lines(self.pictures()[-1])

    def until(self, what, true, look=None):
        look = look or (lambda: self.screen)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            running = self.read()
            screen = look()
            if screen and true(screen):
                return screen
            if not running:
                break
        raise SystemExit(f"top: {what} did not come; the screen is:\n" + "\n".join(look()))

    def ended(self):
        """The program's exit status, and its last output."""
        end = time.monotonic() + PATIENCE
        while self.read():
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                raise SystemExit("top: did not end")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.bytes


def lines(picture):
    return COLOUR.sub("", picture).replace("\r", "").split("\n") if picture else []


def has(*patterns):
    return lambda screen: all(any(re.search(p, line) for line in screen) for p in patterns)


def clients(screen):
    """The numbers in the first column of the table of clients."""
    start = next((i for i, line in enumerate(screen) if line.startswith("CLIENT ")), None)
    return [int(line.split()[0]) for line in screen[start + 1:] if line.strip()] if start is not None else []


def marked(terminal):
    """The title of the column by which rows are sorted."""
    mark = re.search(r"\033\[1;7m *([^\033]+)\033", terminal.whole())
    return mark and mark[1]


def fits(terminal, screen):
    assert len(screen) <= terminal.rows, (len(screen), terminal.rows)
    assert all(len(line) <= terminal.columns for line in screen), max(screen, key=len)


def picture(kvctl):
    t = Terminal(kvctl, "top", "--watch", "0.2")
    screen = t.until("a history", lambda s: has(r"^reused +[▁-█]{24,} ", "^CLIENT")(s) and len(clients(s)) >= 2)
    t.type("q")
    t.ended()
    print("\n".join(line.rstrip() for line in screen if not line.startswith("\033")).rstrip())


def test(kvctl):
    t = Terminal(kvctl, "top", "--watch", "0.1")
    screen = t.until("a picture", lambda s: has("^kvctl top, every 0.1 s: .*q ends", r"^pool +\[[█▓·]+\]",
                                                "^ +held by clients .*evictable .*free ", "^reused ",
                                                "^llama ", "^CLIENT .* HELD ")(s) and len(clients(s)) == 2)
    fits(t, screen)
    # sort: clients by held bytes; then by number, up and down
    assert marked(t) == "HELD", marked(t)
    while marked(t) != "CLIENT":
        n = len(t.pictures())
        t.type("left")
        t.until("the column to the left", lambda s: len(t.pictures()) > n + 2)
    t.until("the order by client", lambda s: clients(s) == sorted(clients(s), reverse=True))
    t.type("r")
    t.until("the other order", lambda s: clients(s) == sorted(clients(s)))
    t.type("right")
    t.until("the next column", lambda s: marked(t) == "PID")
    t.type("left", "left")
    t.until("no order", lambda s: marked(t) is None and clients(s))
    t.type("tab", "s", "s")
    t.until("the order of spaces", lambda s: marked(t) == "SPACE")
    # help, shown and hidden
    t.type("?")
    t.until("help", has("^keys: q quits"))
    t.type("h")
    t.until("no help", lambda s: has("^CLIENT")(s) and not has("^keys:")(s))
    # a paused picture stays the same: keys redraw it, but no samples are taken
    t.type(" ")
    t.until("PAUSED", has("PAUSED$"), lambda: t.still)
    n = len(t.pictures())
    for _ in range(20):
        t.read()
    assert len(t.pictures()) == n, "a paused picture changes"
    t.type("?")
    t.until("help while paused", has("PAUSED$", "^keys: "), lambda: t.still)
    t.type("?", " ")
    t.until("it goes on", lambda s: not has("PAUSED")(s) and has("^CLIENT")(s))
    # small, narrow, and large again
    t.resize(10, 40)
    fits(t, t.until("a small picture", lambda s: len(s) <= 10 and max(map(len, s)) <= 40 and has("^pool")(s)))
    t.type("down", "down", "down", "down", "down", "down")
    t.until("scrolled", lambda s: len(s) <= 10 and not has("^pool")(s))
    t.type("up", "up", "up", "up", "up", "up")
    t.until("scrolled back", has("^pool"))
    t.type("pgdn", "pgdn", "pgdn", "pgdn", "pgdn")     # not beyond the end
    t.until("the end", lambda s: not has("^pool")(s) and len([x for x in s if x.strip()]) > 1)
    t.type("\033[5~", "\033[5~", "\033[5~", "\033[5~", "\033[5~", "\033[15~", "x")
    t.resize(24, 80)
    fits(t, t.until("a large picture", has("^pool", "^CLIENT")))
    t.type("q")
    status, everything = t.ended()
    assert status == 0 and everything.endswith(b"\033[?25h\033[?1049l"), (status, everything[-80:])
    # the keyboard is restored: typed characters are shown again
    t = Terminal("/bin/sh", "-c", f"stty -a >&2; {kvctl} top -n 2 --watch 0.1; stty -a >&2")
    status, everything = t.ended()
    flags = re.findall(rb"(-?icanon|-?echo)\b", everything)
    assert status == 0 and flags == flags[:2] * 2 == [b"icanon", b"echo"] * 2, (status, flags)


if len(sys.argv) > 2:
    picture(sys.argv[1])
else:
    test(sys.argv[1])
