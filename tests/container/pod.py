#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the containers of the chart's pod as a node would, with the chart's commands, configuration, folders, users and
probes, and lets the daemon hang and die.

    pod.py ROOT FOLDER      FOLDER: tools/container; $KVD, $KVCTL and $KVLM are the programs, $KVLM_MODEL is kvlm's

A container is a read-only root with the chart's mounts, a user without capabilities, and the environment of the chart. All
of them are in namespaces of mounts and the network. It needs root. Not here: the seccomp profile, cgroups and user
namespaces.
"""
from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

try:
    import yaml     # noqa: F401
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
sys.dont_write_bytecode = True
import render   # noqa: E402

CHART = Path(sys.argv[2]) / "chart"
NAMESPACES = ["unshare", "--mount", "--propagation", "private", "--net"]
PATIENCE = 600      # seconds
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def skip(why: str) -> None:
    print(f"skipped: {why}")
    sys.exit(77)


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SystemExit(f"{what}: {found!r}, not {wanted!r}")


def until(what: str, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit(f"not so after {PATIENCE} s: {what}")
        time.sleep(0.05)


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


class Node:
    """Folders of the node, volumes of the pod, and a root for each container."""

    def __init__(self, folder: Path, objects: list[dict]) -> None:
        self.folder, self.roots = folder, 0
        self.pod = next(it for it in objects if it["kind"] == "DaemonSet")["spec"]["template"]["spec"]
        config = next(it for it in objects if it["kind"] == "ConfigMap")["data"]
        self.volumes = {it["name"]: self.volume(it, config) for it in self.pod["volumes"]}
        self.image = self.programs(folder / "image")

    def volume(self, volume: dict, config: dict) -> Path:
        at = self.folder / "volumes" / volume["name"]
        at.mkdir(parents=True)      # of root, and 0755, as kubelet makes it
        at.chmod(0o777 if "emptyDir" in volume else 0o755)
        if "configMap" in volume:   # links, as kubelet makes them to replace all files at once
            (at / "..data").symlink_to("..now")
            (at / "..now").mkdir()
            for name, text in config.items():
                (at / "..now" / name).write_text(text)
                (at / name).symlink_to(f"..data/{name}")
        return at

    def programs(self, at: Path) -> Path:
        at.mkdir()
        for name in ("KVD", "KVCTL", "KVLM"):
            shutil.copy(os.environ[name], at)
        shutil.copytree(os.environ["KVLM_MODEL"], at / "model")
        (at / "prompt").write_text(" ".join(map(str, range(200))))
        return at

    def root(self, mounts: list[dict]) -> Path:
        """A read-only root with the system's programs and libraries, kvd's, and these mounts."""
        self.roots += 1
        at = self.folder / f"root-{self.roots}"
        at.mkdir()
        mount("-t", "tmpfs", "-o", "mode=755", "none", at)
        for name in ("usr", "bin", "sbin", "lib", "lib64"):
            self.show(at, Path("/", name))
        for name in ("proc", "dev"):
            (at / name).mkdir()
            mount("--rbind", f"/{name}", at / name)
        (at / "etc").mkdir()
        if os.path.exists("/etc/ld.so.cache"):
            shutil.copy("/etc/ld.so.cache", at / "etc")
        user = self.pod["securityContext"]["runAsUser"]
        (at / "etc/passwd").write_text(f"root:x:0:0::/root:/bin/sh\nkvd:x:{user}:{user}::/var/lib/kvd:/usr/sbin/nologin\n")
        self.bind(self.image, at / "image", "ro")
        for it in mounts:
            self.bind(self.volumes[it["name"]], at / it["mountPath"][1:], "ro" if it.get("readOnly") else "rw")
        mount("-o", "remount,ro", at)
        return at

    def show(self, root: Path, folder: Path) -> None:
        there = root / folder.relative_to("/")
        if folder.is_symlink():
            there.symlink_to(os.readlink(folder))
        elif folder.is_dir():
            self.bind(folder, there, "ro")

    @staticmethod
    def bind(what: Path, there: Path, how: str) -> None:
        there.mkdir(parents=True)
        mount("--bind", what, there)
        mount("-o", f"remount,bind,{how}", there)

    def command(self, container: dict, command: list[str], groups: tuple[int, ...] = ()) -> list[str]:
        """The command, as the container's user with its capabilities."""
        own, all_of = container.get("securityContext", {}), self.pod["securityContext"]
        user, group = own.get("runAsUser", all_of["runAsUser"]), all_of["runAsGroup"] if "runAsUser" not in own else 0
        added = "".join(f",+{name.lower()}" for name in own.get("capabilities", {}).get("add", []))
        names = {it["name"]: it["value"] for it in container.get("env", [])}
        environment = [f"{name}={value}" for name, value in {"PATH": "/image:/usr/bin:/bin", **names}.items()]
        return ["chroot", str(container["root"]), "setpriv", "--reuid", str(user), "--regid", str(group),
                *(["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]),
                f"--bounding-set=-all{added}", "--inh-caps=-all", "--no-new-privs", "env", "-i", *environment, *command]

    def start(self, container: dict) -> subprocess.Popen:
        process = subprocess.Popen(self.command(container, container["command"]), cwd="/")
        atexit.register(process.kill)
        return process


class Container:
    """kvd's, with its probes."""

    def __init__(self, node: Node, container: dict) -> None:
        self.node, self.container = node, container

    def run(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(self.node.command(self.container, list(command)), capture_output=True, text=True, cwd="/", check=False)

    def probe(self, name: str) -> int:
        done = self.run(*self.container[name]["exec"]["command"])
        lines = (done.stdout + done.stderr).splitlines()
        expect(f"lines of {name}: {lines}", len(lines), 1)
        return done.returncode

    def probes(self) -> list[int]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(self.probe, ("readinessProbe", "livenessProbe")))

    def daemon(self) -> int:
        return json.loads(self.run("kvctl", "health", "--json").stdout)["health"]["pid"]


def healthz(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def prepare(node: Node) -> None:
    for container in node.pod["initContainers"]:
        container["root"] = node.root(container["volumeMounts"])
        done = subprocess.run(node.command(container, container["command"]), check=False, cwd="/")
        expect("the init container's status", done.returncode, 0)
    for container in node.pod["containers"]:
        container["root"] = node.root(container["volumeMounts"])


def engine_of(node: Node, kvd: Container, user: int, capabilities: list[str]) -> dict:
    """A pod of its own that has the folder of the sockets, read-only, and no other volume of kvd's."""
    return {"root": node.root([{"name": "sockets", "mountPath": "/run/kvd", "readOnly": True}]), "env": kvd.container["env"],
            "securityContext": {"runAsUser": user, "capabilities": {"add": capabilities}}}


def check_engines(node: Node, kvd: Container) -> None:
    """Engines of a user in the group, of a user outside it, and of root with and without the capability DAC_OVERRIDE."""
    group = node.pod["securityContext"]["runAsGroup"]
    for user, groups, added, wanted in ((4001, (group,), [], 0), (4001, (), [], 3), (0, (), ["DAC_OVERRIDE"], 0), (0, (), [], 3)):
        engine = engine_of(node, kvd, user, added)
        done = subprocess.run(node.command(engine, ["kvctl", "health"], groups), capture_output=True, text=True, cwd="/", check=False)
        expect(f"an engine of user {user} in {groups} with {added}: {done.stdout}{done.stderr}", done.returncode, wanted)

    reused = []
    for _ in range(2):
        command = ["kvlm", "--model", "/image/model", "--text", "/image/prompt", "--max-tokens", "1", "--json", "--verify"]
        done = subprocess.run(node.command(engine_of(node, kvd, 4001, []), command, (group,)), capture_output=True, text=True,
                              cwd="/", check=False)
        expect(f"kvlm's status: {done.stderr}", done.returncode, 0)
        answer = json.loads(done.stdout)
        reused.append(answer["reused_tokens"] * 2 > answer["prompt_tokens"])
    expect("what each of two engines found", reused, [False, True])


def check_pod(objects: list[dict], folder: Path) -> None:
    node = Node(folder, objects)
    prepare(node)
    kvd, exporter = (Container(node, it) for it in node.pod["containers"])
    port = exporter.container["ports"][0]["containerPort"]
    expect("the configuration", kvd.run("kvd", "--check-config", "/etc/kvd/kvd.conf").stderr, "")
    expect("probes before the start", kvd.probes(), [3, 3])
    serves = node.start(exporter.container)
    until("the exporter answers", lambda: healthz(port) != 0)
    expect("/healthz before the start", healthz(port), 503)

    keeper = node.start(kvd.container)
    until("it starts", lambda: kvd.probe("startupProbe") == 0)
    expect("probes", kvd.probes(), [0, 0])
    expect("/healthz", healthz(port), 200)
    check_engines(node, kvd)

    daemon = kvd.daemon()
    os.kill(daemon, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:      # each waits for as long as kvctl health does
        at_exporter, by_probes = pool.submit(healthz, port), pool.submit(kvd.probes)
        expect("/healthz and probes while it hangs", (at_exporter.result(), by_probes.result()), (503, [3, 3]))
    os.kill(daemon, signal.SIGCONT)
    expect("probes after that", kvd.probes(), [0, 0])

    os.kill(daemon, signal.SIGKILL)
    until("the keeper starts another one", lambda: kvd.probe("readinessProbe") == 0 and kvd.daemon() != daemon)
    expect("/healthz of the next one", healthz(port), 200)

    daemon = kvd.daemon()
    for pid in (keeper.pid, daemon):    # as when kubelet ends a pod that does not end by itself
        os.kill(pid, signal.SIGKILL)
    keeper.wait()
    until("it has gone", lambda: kvd.probe("livenessProbe") == 3)
    keeper = node.start(kvd.container)
    until("it starts in the same folders", lambda: kvd.probe("startupProbe") == 0)
    for process in (keeper, serves):
        process.terminate()
        expect("the status in the end", process.wait(), 0)
    expect("probes in the end", kvd.probes(), [3, 3])


def main() -> None:
    if "inside" not in sys.argv:
        if os.getuid() or subprocess.run([*NAMESPACES, "true"], check=False, capture_output=True).returncode:
            skip("it takes root, and namespaces of its own")
        os.execvp(NAMESPACES[0], [*NAMESPACES, "--", sys.executable, *sys.argv, "inside"])
    loopback_up()
    with tempfile.TemporaryDirectory(prefix="kvd-pod-") as folder:
        mount("-t", "tmpfs", "-o", "mode=755", "none", folder)
        try:
            for name, values in (("defaults", {}), ("file", {"file": {"enabled": True, "size": "64M"}})):
                (at := Path(folder, name)).mkdir()
                check_pod(render.objects(CHART, render.merged({"config": {"pool": "64M"}}, values)), at)
        finally:
            subprocess.run(["umount", "--recursive", "--lazy", folder], check=True)


main()
