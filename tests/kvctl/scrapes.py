#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvctl metrics --listen, with well-behaved clients and others.

    scrapes.py KVCTL KVD FOLDER PID      PID: of the daemon, whose socket is FOLDER/kvd.sock
"""
import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import openmetrics

kvctl, kvd, folder, pid = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
path = f"{folder}/metrics.sock"


def serve(address, *before):
    """Starts a server. Returns it and the address that it prints."""
    server = subprocess.Popen([*before, kvctl, "metrics", "--listen", address], stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)        # even if a check below fails
    line = server.stdout.readline()
    assert line.startswith("Metrics are at "), line
    return server, line.split()[3]


def connect(where):
    """A socket that is connected to a port or a path."""
    s = socket.socket(socket.AF_UNIX if where.startswith("/") else socket.AF_INET)
    s.connect(where if where.startswith("/") else ("127.0.0.1", int(where.split(":")[2].split("/")[0])))
    s.settimeout(60)
    return s


def exchange(where, request):
    """Sends bytes and returns the answer, which may be b"". The server need not read the whole request."""
    answer = b""
    with connect(where) as s:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            s.sendall(request)
        with contextlib.suppress(ConnectionResetError):
            while piece := s.recv(65536):
                answer += piece
    return answer


# as Prometheus asks
OPENMETRICS = b"Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"


def scrape(where, accept=OPENMETRICS, plain=False):
    """{(name, labels): value}"""
    head, _, body = exchange(where, b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + accept + b"\r\n\r\n").partition(b"\r\n\r\n")
    kind = b"text/plain; version=0.0.4" if plain else b"application/openmetrics-text; version=1.0.0"
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"Content-Type: " + kind + b"; charset=utf-8\r\n" in head, head
    assert f"Content-Length: {len(body)}".encode() in head, head
    return openmetrics.values((openmetrics.read_plain if plain else openmetrics.read)(body.decode()))


def formats(where):
    """A request that names OpenMetrics in any Accept line gets it. Others, such as curl for promtool, get the older
    format with the same samples."""
    names = {name for name, _ in scrape(where)}
    for accept in (b"Accept: text/plain", b"Accept: */*", b"User-Agent: application/openmetrics-text", b"X: y",
                   b"Accept:", b"X-Accept: application/openmetrics-text"):
        assert {name for name, _ in scrape(where, accept, plain=True)} == names, accept
    for accept in (b"ACCEPT:Application/OpenMetrics-Text", b"Accept: text/plain\r\nAccept: application/openmetrics-text"):
        scrape(where, accept)


def until_up(where, wanted):
    for _ in range(3000):
        if scrape(where)["kvd_up", ()] == wanted:
            return
        time.sleep(0.02)
    raise SystemExit(f"kvd_up is not {wanted}")


def descriptors(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def good_manners(where):
    before = scrape(where)
    assert before["kvd_up", ()] == 1 and len(before) > 200, len(before)
    assert exchange(where, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n").endswith(b"\r\n\r\n")
    assert exchange(where, b"GET /metrics?x=1 HTTP/1.0\n\n").startswith(b"HTTP/1.1 200")
    status, line = healthz(where)
    assert status == b"200" and line.startswith(b"ready: kvd ") and f"(pid {pid})".encode() in line, (status, line)
    assert exchange(where, b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n").endswith(b"\r\n\r\n")
    refused = exchange(where, b"DELETE /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 405") and b"\r\nAllow: GET, HEAD\r\n" in refused, refused
    assert exchange(where, b"GET /healthz/x HTTP/1.1\r\nHost: x\r\n\r\n").endswith(
        b"Metrics are at /metrics, health is at /healthz.\n")
    for request, status in ((b"GET / HTTP/1.1", b"404"), (b"POST /metrics HTTP/1.1", b"405"),
                            (b"GET /metrics FTP/1", b"400"), (b"GET /" + b"x" * 100000, b"414"),
                            (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100000, b"431")):
        answer = exchange(where, request + b"\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status), (request[:40], answer[:80])
    assert exchange(where, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" + b"z" * 100000).startswith(b"HTTP/1.1 200")
    for request in (b"hello", b"GET \0 HTTP/1.1"):  # with an answer or without one, as libmicrohttpd has it
        assert not exchange(where, request + b"\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 2"), request


def bad_manners(server, where):
    """More silent connections than there is room for; half requests; early ends. The server has room for 4 or more."""
    scrape(where)           # now it has a connection to the daemon
    calm = descriptors(server)
    silent = [connect(where) for _ in range(100)]
    for s in silent[-50:]:          # these replaced the others
        s.sendall(b"GET /met")
    scrape(where)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(scrape(where)["kvd_up", ()])) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert answers == [1] * 4, answers
    for s in silent:
        s.close()
    for _ in range(50):
        with connect(where) as s:
            s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")    # and does not wait for the answer
    deaf = connect(where)
    deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    scrape(where)
    deaf.close()
    for _ in range(3000):
        if descriptors(server) <= calm:
            return
        time.sleep(0.02)
    raise SystemExit(f"{descriptors(server)} descriptors, {calm} before")


def healthz(where):
    """The status and the line of /healthz."""
    head, _, body = exchange(where, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").partition(b"\r\n\r\n")
    assert b"Content-Type: text/plain; charset=utf-8\r\n" in head and body.count(b"\n") == 1, (head, body)
    return head.split()[1], body


def restart(where):
    """Kills kvd and starts another one in its place."""
    os.kill(pid, signal.SIGKILL)
    until_up(where, 0)
    assert healthz(where)[0] == b"503" and b"no daemon at" in healthz(where)[1], healthz(where)
    gone = scrape(where)
    assert not any(name.startswith("kvd_space") for name, _ in gone), gone
    other = subprocess.Popen([kvd, "--private", folder, "--pool", "64M"], stderr=subprocess.DEVNULL)
    try:
        until_up(where, 1)
        assert healthz(where)[0] == b"200", healthz(where)
    finally:
        other.terminate()
        other.wait(60)


def main():
    server, where = serve("127.0.0.1:0")
    assert where.startswith("http://127.0.0.1:"), where
    with urllib.request.urlopen(where, timeout=60) as answer:
        openmetrics.read_plain(answer.read().decode())
    formats(where)
    good_manners(where)
    bad_manners(server, where)
    few, at = serve("127.0.0.1:0", "prlimit", "--nofile=20")
    bad_manners(few, at)
    few.terminate()
    assert few.wait(60) == 0, few
    again = subprocess.run([kvctl, "metrics", "--listen", where[7:].split("/")[0]], capture_output=True, text=True,
                           timeout=60, check=False)
    assert again.returncode == 1 and "Address already in use" in again.stderr, again

    local, at = serve(path)
    assert at == path and os.stat(path).st_mode & 0o777 == 0o660, at
    good_manners(at)
    bad_manners(local, at)
    local.kill()            # its socket stays, and the next server replaces it
    local.wait(60)
    local, at = serve(path)
    second = subprocess.run([kvctl, "metrics", "--listen", path], capture_output=True, text=True, timeout=60,
                            check=False)
    assert second.returncode == 1 and os.path.exists(path), second
    scrape(at)
    restart(where)
    for process, number in ((server, signal.SIGINT), (local, signal.SIGTERM)):
        process.send_signal(number)
        assert process.wait(60) == 0, process


main()
