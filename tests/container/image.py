#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The image's recipe, the script that gives it to an engine, and the list of what is in it, without an engine.

    image.py ROOT FOLDER VERSION    FOLDER: tools/container; VERSION: the project's

tests/packages/install.sh runs the recipe's commands in a fresh root.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT, FOLDER, VERSION = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
EPOCH = {"SOURCE_DATE_EPOCH": "1700000000"}
TIME = "2023-11-14T22:13:20Z"
KNOWN = {"ARG", "FROM", "COPY", "RUN", "LABEL", "ENV", "VOLUME", "USER", "HEALTHCHECK", "ENTRYPOINT"}
wrong: list[str] = []


def expect(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        wrong.append(f"{what}: {found!r}, not {wanted!r}")


# ---- the recipe ----------------------------------------------------------------------------------

@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [text for name, text in self.steps if name == word]

    def only(self, word: str) -> str:
        found = self.all(word)
        return found[0] if len(found) == 1 else f"{len(found)} of {word}"


def stages(text: str) -> list[Stage]:
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    found: list[Stage] = []
    for line in filter(None, lines):
        word, _, rest = line.partition(" ")
        if word not in KNOWN:
            wrong.append(f"the recipe has {word}")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(name, base))
        elif found:
            found[-1].steps.append((word, rest))
        else:
            expect("before the first stage", line, "ARG BASE=debian:12-slim")
    return found


def check_recipe() -> None:
    build, runtime, sbom, final = found = stages((FOLDER / "Containerfile").read_text())
    expect("stages", [(it.name, it.base) for it in found],
           [("build", "${BASE}"), ("runtime", "${BASE}"), ("sbom", "runtime"), ("", "runtime")])
    expect("what the image has of the build", [*runtime.all("COPY"), *final.all("COPY")],
           ["--from=build /runtime /packages", "--from=sbom /kvd.spdx.json /usr/share/kvd/"])
    installed = [word for step in runtime.all("RUN") for word in step.split("install -y")[-1].split() if "apt-get install" in step]
    expect("packages of the image", installed, ["--no-install-recommends", "systemd-standalone-sysusers", "/packages/*.deb"])
    expect("the script's place", sbom.only("COPY"), f"{(FOLDER / 'sbom').relative_to(ROOT)} /")
    for step in (*build.all("COPY"), *sbom.all("COPY")):
        expect(f"there is {step}", (ROOT / step.split()[0]).exists(), True)
    check_result(runtime, final)


def check_result(runtime: Stage, final: Stage) -> None:
    user, _, group = final.only("USER").partition(":")
    expect("the image's user is a number, and not root", user.isdigit() and group.isdigit() and int(user) > 0, True)
    created = " ".join(runtime.all("RUN"))
    expect("that user is made", f"--gid {group} kvd" in created and f"--uid {user} --gid kvd" in created, True)
    command = json.loads(final.only("ENTRYPOINT"))
    listens = command[command.index("--socket") + 1]
    expect("kvctl asks where kvd listens", final.only("ENV"), f"KVD_SOCKET={listens}")
    expect("the socket is in the volume", os.path.dirname(listens), final.only("VOLUME"))
    expect("the volume is the user's", f"install -d -o kvd -g kvd {final.only('VOLUME')} " in created + " ", True)
    expect("the keeper is the first process", command[:2], ["kvd", "--keep"])
    probe = final.only("HEALTHCHECK")
    expect("the probe", json.loads(probe.partition("CMD ")[2]), ["kvctl", "health"])
    expect("the probe's limit is longer than kvctl's", int(re.search(r"--timeout=(\d+)s", probe)[1]) > 5, True)
    labels = re.findall(r"org\.opencontainers\.image\.(\w+)=", final.only("LABEL"))
    expect("labels", labels, ["title", "description", "licenses", "version", "revision", "created"])


# ---- the script that builds it -------------------------------------------------------------------

ENGINE = """#!/bin/sh
for last; do :; done
printf '%s\\n' "$0" "$@" >"$NOTES/arguments"
(cd "$last" && find . -type f) >"$NOTES/files"
exit 7
"""


def run_build(folder: Path, engines: list[str], *arguments: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Runs the script where these engines are installed. Returns what the engine was given, too."""
    (bin_ := folder / "-".join(["bin", *engines])).mkdir(exist_ok=True)
    for tool in ("sh", "sed", "head", "date", "mktemp", "tar", "rm", "git", "dirname", "find"):
        if (path := shutil.which(tool)) and not (bin_ / tool).exists():
            (bin_ / tool).symlink_to(path)
    for name in engines:
        (bin_ / name).write_text(ENGINE)
        (bin_ / name).chmod(0o755)
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, **EPOCH, "PATH": str(bin_), "NOTES": str(folder), "TMPDIR": str(folder / "tmp")}
    (folder / "arguments").unlink(missing_ok=True)
    done = subprocess.run([bin_ / "sh", FOLDER / "build", *arguments], env=environment, capture_output=True, text=True, check=False)
    expect("the script's leftovers", list((folder / "tmp").iterdir()), [])
    notes = folder / "arguments"
    return done, notes.read_text().splitlines() if notes.exists() else []


def check_build(folder: Path) -> None:
    for engines, chosen in ((["docker", "podman"], "docker"), (["buildah", "podman"], "podman"), (["buildah"], "buildah")):
        done, given = run_build(folder, engines, "--tag", "mine", "--no-cache")
        expect(f"the engine's status with {engines}: {done.stderr}", done.returncode, 7)
        expect(f"the engine among {engines}", Path(given[0]).name, chosen)
        expect("its format", ("docker" in given[1:], "--format" in given), (chosen != "docker",) * 2)
        expect("the tag", given[given.index("--tag") + 1], "mine")
        expect("its arguments", "--no-cache" in given, True)
        expect("the recipe is that of the sources", given[given.index("--file") + 1], f"{given[-1]}/tools/container/Containerfile")
        arguments = dict(word.split("=", 1) for word in given if re.match(r"[A-Z]+=", word))
        expect("version and time", (arguments["VERSION"], arguments["CREATED"]), (VERSION, TIME))
        expect("the recipe has all arguments", [name for name in arguments if f"ARG {name}" not in (FOLDER / "Containerfile").read_text()], [])
    files = set((folder / "files").read_text().splitlines())
    expect("the sources are there", {"./meson.build", "./tools/deb", "./daemon/main/main.c"} <= files, True)
    expect("and nothing that was built", [name for name in files if name.startswith(("./build", "./.git/"))], [])
    done, given = run_build(folder, ["docker", "podman"], "--engine", "podman", "--base", "mirror/debian:12-slim")
    expect("the engine that was named", Path(given[0]).name, "podman")
    expect("its base", "BASE=mirror/debian:12-slim" in given, True)
    done, given = run_build(folder, [])
    expect("without an engine", (done.returncode, done.stderr, given), (1, "install docker, podman or buildah\n", []))
    expect("with another one", run_build(folder, ["docker"], "--engine", "make")[0].returncode, 2)


# ---- what is in it -------------------------------------------------------------------------------

STATUS = """Package: kvd
Status: install ok installed
Version: {version}
Architecture: amd64
Maintainer: A "quoted\\name" <a@example.org>
Description: the daemon

Package: libstdc++6
Status: install ok installed
Version: 1:12.2.0-14+deb12u1~x
Architecture: amd64
Maintainer: Somebody <s@example.org>
Description: a library

Package: gone
Status: deinstall ok config-files
Version: 1
Architecture: all
Maintainer: Nobody <n@example.org>
Description: removed
"""


def sbom(*arguments: str | Path) -> dict:
    done = subprocess.run(["sh", FOLDER / "sbom", *arguments], env={**os.environ, **EPOCH}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def check_document(it: dict) -> None:
    """SPDX 2.3 in what it demands of such a document."""
    expect("version", (it["spdxVersion"], it["dataLicense"], it["SPDXID"]), ("SPDX-2.3", "CC0-1.0", "SPDXRef-DOCUMENT"))
    expect("time", it["creationInfo"]["created"], TIME)
    ids = [package["SPDXID"] for package in it["packages"]]
    expect("every id once", len(set(ids)), len(ids))
    expect("ids of other letters", [one for one in ids if not re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", one)], [])
    for package in it["packages"]:
        if not {"name", "downloadLocation"} <= package.keys() or package["filesAnalyzed"] is not False:
            wrong.append(f"{package} lacks something")
    related = [(one["spdxElementId"], one["relationshipType"], one["relatedSpdxElement"]) for one in it["relationships"]]
    expect("relations", related, [("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-image"),
                                  *(("SPDXRef-image", "CONTAINS", one) for one in ids[1:])])


def check_sbom(folder: Path) -> None:
    (folder / "dpkg/updates").mkdir(parents=True)
    (folder / "dpkg/info").mkdir()
    (folder / "dpkg/status").write_text(STATUS.format(version=VERSION))
    it = sbom("--admindir", folder / "dpkg")
    check_document(it)
    expect("same again", it, sbom("--admindir", folder / "dpkg"))
    _, kvd, library = it["packages"]
    expect("kvd", (kvd["name"], kvd["versionInfo"], kvd["licenseDeclared"], kvd["supplier"]),
           ("kvd", VERSION, "Apache-2.0", 'Organization: A "quoted\\name" (a@example.org)'))
    expect("a library", (library["SPDXID"], library["licenseDeclared"], library["externalRefs"][0]["referenceLocator"]),
           ("SPDXRef-libstdc-plus--plus-6-amd64", "NOASSERTION", "pkg:deb/debian/libstdc%2B%2B6@1%3A12.2.0-14%2Bdeb12u1%7Ex?arch=amd64"))
    here = subprocess.run(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\\n"], capture_output=True, text=True,
                          check=True).stdout.splitlines()
    it = sbom()
    check_document(it)
    expect("all packages of this system", sorted((one["name"], one["versionInfo"]) for one in it["packages"][1:]),
           sorted(tuple(line.split()[1:]) for line in here if line.startswith("installed ")))


def main() -> None:
    check_recipe()
    with tempfile.TemporaryDirectory(prefix="kvd-image-") as folder:
        check_build(Path(folder))
        if shutil.which("dpkg-query"):
            check_sbom(Path(folder))
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


main()
