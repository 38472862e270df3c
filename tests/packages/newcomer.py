#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Follows README.md, word for word, in a fresh, minimal Debian 12, and prints the transcript.

    newcomer.py user|root [--root DIR] [--log FILE]

    user        user ann without root rights; root runs only the commands that need them
    root        runs everything as root, with nothing installed
    --root DIR  keeps the Debian in DIR; without it, in a folder that is removed
    --log FILE  also writes the transcript to FILE

Needs root, mmdebstrap and a mirror ($KVD_TEST_MIRROR); without them, exit status 77. It takes a quarter of an hour, so
CI does not run it: there, suite `pasted` runs README's blocks, and tests/packages/install.sh its packages. Not run here
are commands that need a service manager and tools/deb (install.sh does both), and engines (tests/engines/run). Exit
status 1 if a command ends with an error that README does not announce.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.append(str(ROOT / "tests/tree/pasted"))

from blocks import blocks_of, commands  # noqa: E402

MIRROR = os.environ.get("KVD_TEST_MIRROR", "http://deb.debian.org/debian")
ELSEWHERE = ("systemctl", "tools/deb", "vllm", "tools/evidence")


class Newcomer:
    """A Debian, its user, and the transcript."""

    def __init__(self, root: Path, name: str, log: Path | None) -> None:
        self.root, self.name = root, name
        self.home = "/root" if name == "root" else f"/home/{name}"
        self.log = log.open("w") if log else None
        self.failed = 0

    def say(self, text: str) -> None:
        print(text, end="", flush=True)
        if self.log:
            self.log.write(text)
            self.log.flush()

    def run(self, who: str, script: str, fails: bool = False) -> None:
        """`fails`: an error is expected, since README, or kvd itself, announces it."""
        for line in script.strip().splitlines():
            self.say(f"{who}{'#' if who == 'root' else '$'} {line}\n")
        inside = (f"cd {self.home}/kvd; export LC_ALL=C.UTF-8 HOME={self.home if who == self.name else '/root'}; "
                  f"sudo() {{ \"$@\"; }}\n{script}")
        inside = inside if who == "root" else f"exec su {who} -c {shlex.quote('bash -c ' + shlex.quote(inside))}"
        mounts = "mount -t proc proc proc; mount --rbind /dev dev; mount -t tmpfs tmpfs tmp"
        outside = (f"cd {self.root}; {mounts}; exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "
                   f"TERM=dumb DEBIAN_FRONTEND=noninteractive chroot . bash -c {shlex.quote(inside)}")
        process = subprocess.Popen(["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private",
                                    "bash", "-ec", outside], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors="replace")
        process.stdin.write("y\n")      # apt-get asks
        process.stdin.close()
        for line in process.stdout:
            self.say(line)
        if (process.wait() != 0) != fails:
            self.failed += 1
            self.say(f"*** exit status {process.returncode}\n")
        self.say("\n")


def install(at: Path) -> bool:
    print("Installing a minimal Debian 12", file=sys.stderr)
    done = subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io", "--include=ca-certificates",
                           "bookworm", str(at), MIRROR], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(f"skipped: mmdebstrap: {done.stdout[-300:]}")
    return done.returncode == 0


def source_into(it: Newcomer) -> None:
    """Copies the source tree, as git clone would. A minimal Debian has no git."""
    target = it.root / it.home[1:] / "kvd"
    if it.name != "root":
        subprocess.run(["chroot", it.root, "useradd", "-m", it.name], check=True)
    subprocess.run(["git", "clone", "-q", f"file://{ROOT}", target], check=True)
    shutil.rmtree(target / ".git")
    if it.name != "root":
        subprocess.run(["chroot", it.root, "chown", "-R", f"{it.name}:", f"{it.home}/kvd"], check=True)


def follow(it: Newcomer) -> None:
    """Follows README from its top: if rights or a package are missing, the user is told so, and root is asked. The blocks
    after the build are pasted into one shell."""
    files, session = {}, []
    if it.name != "root":
        it.run(it.name, "sh tools/demo", fails=True)
    for block in blocks_of(ROOT / "README.md"):
        text = commands(block)
        if block.mark == "file":
            files[block.value] = block.text
        elif block.language != "sh" or any(word in text for word in ELSEWHERE):
            continue
        elif "apt-get install" in text:
            it.run("root", text)
            if it.name != "root":
                it.run(it.name, "sh tools/demo")
        elif it.name == "root" or "tools/demo" not in text:
            session.append(text)
    save(it, files)
    it.run(it.name, "".join(session))


def save(it: Newcomer, files: dict[str, str]) -> None:
    for name, text in files.items():
        (it.root / it.home[1:] / "kvd" / name).write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("who", choices=["user", "root"])
    parser.add_argument("--root", type=Path)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    if os.getuid() or not shutil.which("mmdebstrap"):
        print("skipped: it takes root and mmdebstrap")
        return 77
    with tempfile.TemporaryDirectory(prefix="kvd-newcomer-") as folder:
        at = options.root or Path(folder) / "root"
        if not install(at):
            return 77
        it = Newcomer(at.resolve(), "ann" if options.who == "user" else "root", options.log)
        source_into(it)
        follow(it)
    print(f"{it.failed} commands failed")
    return 1 if it.failed else 0


if __name__ == "__main__":
    sys.exit(main())
