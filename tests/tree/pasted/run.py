# SPDX-License-Identifier: Apache-2.0
"""Runs everything that can be pasted from a page, unchanged, in a copy of the source tree.

    run.py ROOT BUILD PAGE      PAGE: README.md, or a manual page; BUILD: where kvd, kvctl, kvlm and libkvd are

README.md is run as a newcomer reads it: its blocks are pasted into one shell, one after the other, with only the
system's environment. The files that ninja would build are put where it would build them. Other pages are for people
who have installed kvd: a daemon listens at $KVD_SOCKET, with a space `llama` in which a client holds blocks, each
block begins in the root of the copy, and ninja only prints what it would build.

Pages name ports. As root, a run has a network of its own, so that another program's ports do not matter.

Programs in C are compiled, and run three times: with nothing cached, with everything cached, and without a daemon,
which they must report. Scripts that build, test or show everything are not run: they must exist, and have the options
that they are pasted with.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from blocks import Block, blocks_of, commands

LIMIT = 600         # seconds that a block may take, even on a busy machine
# Waits until a private daemon in the background answers; replaces a short sleep in the page.
READY = ("tries=0; until KVD_SOCKET={}/kvd.sock kvctl ping >/dev/null 2>&1 || [ $((tries += 1)) -gt 600 ]; do "
         "sleep 0.1; done")
PRIVATE = re.compile(r"kvd .*--private (\S+)")
WHOLE = re.compile(r"(?:sh )?(tools/\w+|tests/\w+/run|tests/run-long)\b(.*)")
ROOTS = re.compile(r"\b(sudo|systemctl|apt-get|pip3? install)\b")
RESULT = re.compile(r"# (\d+ tokens found, .*)$", re.M)     # output of a command according to the page
END = "the block is done"
NAMES = re.compile(r"^(admins|users|groups)\s*=.*", re.M)
CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x40000000, 0x8914, 1


class Wrong(Exception):
    """A block did not do what its page says."""


class Pasted:
    def __init__(self, root: Path, build: Path, scratch: Path) -> None:
        self.root, self.build, self.scratch = root, build, scratch
        self.copy = scratch / "kvd"
        tools = [scratch / "bin", build / "daemon", build / "tools/kvctl", build / "tools/kvlm"]
        self.environment = dict(
            os.environ, HOME=str(scratch), KVD_SOCKET=str(scratch / "d/kvd.sock"), NO_COLOR="", LC_ALL="C.UTF-8",
            PATH=":".join([*map(str, tools), os.environ["PATH"]]), LD_LIBRARY_PATH=str(build / "client"),
            PKG_CONFIG_PATH=str(build / "meson-uninstalled"), PYTHONPATH=str(root / "client/python"),
            KVD_LIBRARY=str(build / "client/libkvd.so.0"),
            KVD_KERNELS_LIBRARY=str(build / "kernels/libkvd_kernels.so.0"), PYTHONDONTWRITEBYTECODE="1")
        self.processes: list[subprocess.Popen] = []

    # ---- what the blocks find ----------------------------------------------------------------------------------

    def start(self) -> None:
        self.shim("ninja", f'exec {shutil.which("ninja")} -n "$@"') # dry run: tools/test does the builds
        shutil.copytree(self.root, self.copy, ignore=self.not_sources)
        (self.scratch / "d").mkdir(mode=0o700)
        self.spawn("kvd", "--private", str(self.scratch / "d"), "--pool", "64M", stderr=subprocess.DEVNULL)
        self.wait_for(lambda: self.call(["kvctl", "ping"]).returncode == 0, "the daemon does not answer")
        self.spawn(str(self.build / "tests/kvctl/kvctl-filler"), "llama", stdin=subprocess.PIPE,
                   stdout=subprocess.PIPE).stdout.readline()

    def not_sources(self, folder: str, names: list[str]) -> set[str]:
        builds = {name for name in names if name.startswith("build")} if Path(folder) == self.root else set()
        return builds | {".git", "__pycache__"}

    def shim(self, name: str, line: str) -> None:
        (self.scratch / "bin").mkdir(exist_ok=True)
        (self.scratch / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (self.scratch / "bin" / name).chmod(0o755)

    def spawn(self, *command: str, **more) -> subprocess.Popen:
        process = subprocess.Popen(command, env=self.environment, **more)
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait()

    def call(self, command: list[str], **more) -> subprocess.CompletedProcess:
        process = subprocess.Popen(command, env={**self.environment, **more}, cwd=self.copy, text=True, errors="replace",
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   start_new_session=True)
        try:
            return subprocess.CompletedProcess(command, stdout=process.communicate(timeout=LIMIT)[0],
                                               returncode=process.returncode)
        finally:
            if process.poll() is None: # it took too long: end it and all its children
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @staticmethod
    def wait_for(condition, otherwise: str) -> None:
        for _ in range(1200):
            if condition():
                return
            time.sleep(0.05)
        raise Wrong(otherwise)

    # ---- shell -------------------------------------------------------------------------------------------------

    def exists(self, program: str, arguments: str) -> None:
        """For a whole build or test: the script must be there, and its first lines must name the options."""
        head = (self.copy / program).read_text()[:2500]
        if program == "tools/build":
            head += re.sub(r"option\('", "--", (self.copy / "meson_options.txt").read_text())
        for option in re.findall(r"--[a-z_-]+", arguments.partition("#")[0]):
            if option not in head:
                raise Wrong(f"{program} has no option {option}")

    def script(self, block: Block) -> str:
        """The block, without the lines that build or test everything. A daemon that it starts is left running."""
        lines, begun = [], None
        for line in commands(block).splitlines():
            whole, private = WHOLE.match(line), PRIVATE.match(line)
            if whole and whole[1] != "tools/packages":
                self.exists(whole[1], whole[2])
            elif private and not line.rstrip().endswith("&"):
                lines += [f"{line} & begun=$!", "trap 'kill $begun; wait' EXIT", READY.format(private[1])]
            elif begun and re.fullmatch(r"sleep \d+", line):
                lines.append(READY.format(begun[1]))
            else:
                lines += [line, "wait $!"] if line == "kill $!" else [line]
            begun = private
        return "set -e\n" + "\n".join(lines) + "\n"

    def shell(self, block: Block) -> None:
        if ROOTS.search(block.text):
            raise Wrong("changes the machine; mark it as not run")
        done = self.call(["bash", "-c", self.script(block)])
        if done.returncode:
            raise Wrong(f"exit status {done.returncode}\n{done.stdout[-2000:]}")

    @staticmethod
    def waits(pid: int) -> bool:
        """Has the shell become the program, and does the program sleep nearly all the time?"""
        asleep = 0
        for _ in range(10):
            time.sleep(0.02)
            asleep += Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
        return asleep > 7 and Path(f"/proc/{pid}/comm").read_text() != "bash\n"

    def until_interrupted(self, block: Block) -> None:
        """Sends SIGINT to the last command, which runs alone in its process."""
        *before, last = self.script(block).splitlines()
        process = subprocess.Popen(["bash", "-c", "\n".join([*before, f"exec {last}"])], env=self.environment,
                                   cwd=self.copy, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.wait_for(lambda: process.poll() is not None or self.waits(process.pid), "is always busy")
        early = process.poll()
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=LIMIT)[0]
        if early is not None or process.returncode not in (0, 130, -signal.SIGINT):
            raise Wrong(f"exit status {process.returncode}\n{output[-2000:]}")

    # ---- other languages -----------------------------------------------------------------------------------------

    def compile(self, source: Path, *more: str) -> None:
        flags = self.call(["pkg-config", "--cflags", "--libs", "libkvd"])
        done = self.call([*shlex.split(os.environ.get("CC", "cc")), "-Wall", "-Wextra", "-Werror", str(source), *more,
                          *flags.stdout.split()])
        if flags.returncode or done.returncode:
            raise Wrong(f"does not compile\n{flags.stdout}{done.stdout}")

    def c(self, block: Block) -> None:
        source = self.copy / (block.value if block.mark == "file" else "pasted.c")
        source.write_text(block.text)
        if block.mark == "compiled":
            self.compile(source, "-fsyntax-only", f"-I{self.root}/client")
            return
        self.compile(source, "-o", str(self.scratch / "program"))
        runs = [self.call([str(self.scratch / "program")]) for _ in range(2)]
        for done in runs:
            if done.returncode:
                raise Wrong(f"exit status {done.returncode}\n{done.stdout}")
        if runs[0].stdout == runs[1].stdout:
            raise Wrong(f"the second run does not find what the first computed\n{done.stdout}")
        done = self.call([str(self.scratch / "program")], KVD_SOCKET=str(self.scratch / "nobody"))
        if done.returncode <= 0 or not done.stdout.strip():
            raise Wrong(f"without a daemon: exit status {done.returncode}\n{done.stdout}")

    def python(self, block: Block) -> None:
        for run in ("first", "second"):
            done = self.call([sys.executable, "-c", block.text])
            if done.returncode:
                raise Wrong(f"{run} run\n{done.stdout[-2000:]}")

    def ini(self, block: Block) -> None:
        """Checks a configuration, whose users and groups are those of another machine."""
        path = self.scratch / "kvd.conf"
        numbers = iter(range(60000, 61000))
        path.write_text(NAMES.sub(lambda m: f"{m[1]} = {next(numbers)}", block.text))
        done = self.call(["kvd", "--check-config", str(path)])
        if done.returncode:
            raise Wrong(done.stdout)

    def check(self) -> None:
        check = self.call(["kvctl", "check"])
        if check.returncode:
            raise Wrong(f"kvctl check\n{check.stdout}")

    def run(self, block: Block) -> None:
        if block.mark == "until Ctrl-C":
            self.until_interrupted(block)
        elif block.mark == "file" and block.language != "c":
            (self.copy / block.value).write_text(block.text)
        else:
            {"sh": self.shell, "c": self.c, "python": self.python, "ini": self.ini}[block.language](block)


class Newcomer(Pasted):
    """Runs all blocks in one shell, which keeps their variables."""

    BUILT = ("daemon/kvd", "tools/kvctl/kvctl", "tools/kvlm/kvlm", "client/libkvd.so*", "kernels/libkvd_kernels.so*")

    def start(self) -> None:
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("KVD")}
        self.environment |= {"HOME": str(self.scratch), "PATH": f"{self.scratch}/bin:{os.environ['PATH']}",
                             "LC_ALL": "C.UTF-8", "NO_COLOR": "", "PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("LD_LIBRARY_PATH", "PKG_CONFIG_PATH", "PYTHONPATH"):
            self.environment.pop(name, None)
        built = [path.relative_to(self.build) for one in self.BUILT for path in self.build.glob(one) if path.is_file()]
        copies = " && ".join(f"mkdir -p build/{one.parent} && cp -P {self.build}/{one} build/{one}" for one in built)
        self.shim("ninja", f'{shutil.which("ninja")} -n "$@" || exit 1\n[ "$1" != -C ] || {{ {copies}; }}')
        shutil.copytree(self.root, self.copy, ignore=self.not_sources)
        self.session = self.spawn("bash", "--norc", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, errors="replace", cwd=self.copy)

    def paste(self, script: str) -> list[str]:
        """The shell's output. It ends where a command fails."""
        (self.scratch / "block.sh").write_text(script)
        try:
            self.session.stdin.write(f". {self.scratch}/block.sh </dev/null; set +e; echo {END}\n")
            self.session.stdin.flush()
        except BrokenPipeError:
            raise Wrong("the shell has ended") from None
        said = []
        for line in self.session.stdout:
            if line.endswith(f"{END}\n"):
                return said
            said.append(line.rstrip("\n"))
        raise Wrong("\n".join(said)[-2000:])

    def shell(self, block: Block) -> None:
        if ROOTS.search(block.text):
            raise Wrong("changes the machine; mark it as not run")
        said = self.paste(self.script(block))
        for promised in RESULT.findall(block.text):
            if promised not in said:
                raise Wrong("\n".join([f"it does not say: {promised}", *said])[-2000:])

    def c(self, block: Block) -> None:
        (self.copy / block.value).write_text(block.text)
        done = self.call(["cc", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{self.root}/client", block.value])
        if done.returncode:
            raise Wrong(f"does not compile\n{done.stdout}")

    def check(self) -> None:
        self.paste("kvctl check >/dev/null")
        self.paste("KVD_SOCKET=~/nobody python3 quickstart.py && exit 1 || [ $? -lt 128 ]")


def enter_own_network() -> None:
    """Leaves the machine's network for a new one, which has a loopback interface, if this process may."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def main() -> int:
    enter_own_network()
    root, build, page = (Path(a).resolve() for a in sys.argv[1:4])
    blocks, failed = blocks_of(page), 0
    if not blocks and ".Sh EXAMPLES" not in page.read_text():
        print("skip: it has no examples")
        return 77
    with tempfile.TemporaryDirectory(prefix="kvd-") as scratch:
        pasted = (Newcomer if page.name == "README.md" else Pasted)(root, build, Path(scratch))
        try:
            pasted.start()
            for block in blocks:
                if block.mark == "not run":
                    print(f"skip {block}: {block.value}")
                    continue
                try:
                    pasted.run(block)
                    print(f"ok   {block}")
                except (Wrong, subprocess.TimeoutExpired) as wrong:
                    failed += 1
                    print(f"FAIL {block}: {wrong}")
            try:
                pasted.check()
            except Wrong as wrong:
                failed += 1
                print(f"FAIL {wrong}")
        finally:
            pasted.stop()
    return 1 if failed or not blocks else 0


if __name__ == "__main__":
    sys.exit(main())
