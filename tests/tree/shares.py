#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A limit that all clients share, and that one of them can use up, is a fault. shares.def lists every constant that
bounds something in the store or the daemon, and how clients share it.

    shares.py ROOT          one line per constant that is missing there, or listed but does not exist; status 1 if any
    shares.py --self-test   tests that it finds them

A constant bounds something if it is the size of an array or an allocation, or if its name (MAX, MOST, SEATS, PLACES,
WAITING) or its comment (at once, under way, at most) says so. Times are not listed, since they only bound waiting.
"""
import pathlib
import re
import sys
import tempfile

LIST = "tests/tree/shares.def"
FOLDERS = ("store", "daemon", "ipc/base")
# Programs of child processes: the daemon bounds its requests to them.
OTHERS = ("daemon/process/worker/", "daemon/process/disk/", "daemon/process/remote/", "daemon/process/keeper/", "daemon/process/exporter/")
KINDS = ("account", "process", "user", "domain", "space", "client", "piece", "thing", "memory", "common")

DEFINE = re.compile(r"^#define +([A-Z][A-Z_0-9]*) +([\d(U][^\n]*)", re.M)
NAMED = re.compile(r"(^|_)(MAX|MOST|SEATS|PLACES|WAITING)(_|$)")
SAID = re.compile(r"/\*.*\b(at once, of all|under way|at most|that there can be|of all spaces|at once \*/)")
TIME = re.compile(r"_(NS|US|MS)$")
ROW = re.compile(r"^(\S+) +([A-Z_0-9]+) +(\w+)(?: (\w+))?: (.+)$")


def bounds(name, value, scope):
    """Does the constant bound something, in the code that can see it?"""
    if TIME.search(name):
        return False
    word = r"\b%s\b" % name
    return bool(NAMED.search(name) or SAID.search(value) or re.search(r"\[[^\]\n]*%s[^\]\n]*\]" % word, scope) or
                re.search(r"(calloc|_new|listen)\([^;\n]*%s" % word, scope))


def constants(root):
    texts = {path.relative_to(root).as_posix(): path.read_text() for folder in FOLDERS
             for path in sorted((root / folder).rglob("*.[ch]"))}
    texts = {path: text for path, text in texts.items() if not path.startswith(OTHERS)}
    everything = "\n".join(texts.values())
    return {(path, name) for path, text in texts.items() for name, value in DEFINE.findall(text)
            if bounds(name, value, everything if path.endswith(".h") else text)}


def rows(root):
    """{(path, name): complaint or None}"""
    costs = set(re.findall(r"^KVD_COST\((\w+),", (root / "ipc/base/costs.def").read_text(), re.M))
    result = {}
    for line in (root / LIST).read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        row = ROW.match(line)
        if not row or row[3] not in KINDS:
            result[line, ""] = "is not PATH NAME KIND: REASON"
        elif (row[3] == "account") != bool(row[4]) or (row[4] and row[4] not in costs):
            result[row[1], row[2]] = "names no cost of costs.def"
        else:
            result[row[1], row[2]] = None
    return result


def complaints(root):
    there, listed = constants(root), rows(root)
    for path, name in sorted(there - set(listed)):
        yield f"{path}: {name} bounds something, and {LIST} does not say how clients share it"
    for (path, name), complaint in sorted(listed.items()):
        if complaint or (path, name) not in there:
            yield f"{LIST}: {path} {name} {complaint or 'bounds nothing, or does not exist'}"


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name in FOLDERS + ("tests/tree",):
            (root / name).mkdir(parents=True)
        (root / "ipc/base/costs.def").write_text('KVD_COST(files, "number", "descriptors")\n')
        (root / "store/a.h").write_text("#define PLACES 8u\n#define WAIT_MOST_NS 5u\n#define FEW 3u\n#define ODD 4u\n")
        (root / "store/b.c").write_text("static int table[FEW];\n#define GONE 7u\n")
        (root / LIST).write_text("# path name kind\nstore/a.h PLACES account files: each is one\n")
        assert list(complaints(root)) == [f"store/a.h: FEW bounds something, and {LIST} does not say how clients share it"]
        (root / LIST).write_text("store/a.h PLACES account nothing: x\nstore/a.h FEW piece: x\nstore/b.c GONE thing: x\n")
        found = list(complaints(root))
        assert len(found) == 2 and "names no cost" in found[0] and "does not exist" in found[1], found
    print("shares finds what is planted")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    found = list(complaints(pathlib.Path(sys.argv[1])))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
