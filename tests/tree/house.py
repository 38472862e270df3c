#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the source tree: sizes, circular dependencies of files, what its folders know of each other, duplicates.

    house.py ROOT           prints the tables
    house.py ROOT --limits  one line for each limit (LIMITS) that is exceeded; exit status 1 if there are any
    house.py --self-test    tests that it finds each of them

A file depends on another if it names a function or a constant object that only the other defines. This goes by names,
so a dependency is a place to look at, not a verdict. A circle is a set of files each of which depends, through others,
on all the others. A foreign field is a mention of a field of struct space (`space->...`) in the store, but outside the
folder that owns it. A lone hook is a member of struct hooks that one part alone sets: an event that is a call in
disguise. Duplicates are runs of at least DUPLICATE lines that occur twice, regardless of spaces and names of variables.
"""
import collections
import itertools
import pathlib
import re
import statistics
import sys
import tempfile

FOLDERS = ("client", "daemon", "ipc", "kernels", "store", "tools/kvctl", "tools/kvlm", "tests")
SOURCES = {".c", ".h", ".cu", ".cuh"}
STRUCTS = {"space": "store", "store": "store", "block": "store"}
OWNER = "store/cache/"      # of struct space
PRODUCT = ("client", "daemon", "ipc", "kernels", "store", "systemd", "tools")
METHODS = "ipc/base/methods.def"
DUPLICATE = 6
COLUMNS = 100

# The largest allowed numbers: files of a circle, fields of a struct, lines of a function, foreign fields, lone hooks,
# files of the product that name a method (another method: FEW).
LIMITS = {
    "circle client": 4, "circle daemon": 4, "circle ipc": 4, "circle store": 4, "circle tools/kvctl": 4,
    "circle tools/kvlm": 4, "circle kernels": 4, "fields space": 24, "fields store": 20, "function": 48, "notes": 0,
    "foreign": 47, "lone": 0,
    "method": {"bicache": 36, "memshare": 40, "keydiff": 39, "kvreviver": 32, "hshare": 38},
}
FEW = 25

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
WORD = re.compile(r"\b[A-Za-z_]\w*\b")
FUNCTION = re.compile(r"^(static )?(?!typedef|struct \w+ \{|enum|union|extern|#)[A-Za-z_][^\n;={}]*?\b(\w+)"
                      r"\(((?:[^;{}()]|\([^()]*\))*)\)[^;{}=]*\{\n(.*?)^\}", re.S | re.M)
OBJECT = re.compile(r"^(?:extern )?const struct \w+ (?:\*const )?(\w+)(?:\[\w*\])? = ", re.M)


def plain(text):
    """The text with comments and strings blanked out; lines stay where they are."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())      # noqa: E731
    return STRING.sub('""', COMMENT.sub(blank, text))


class Source:
    def __init__(self, root, path):
        self.path, self.folder = path.relative_to(root).as_posix(), None
        self.text = path.read_text(errors="replace")
        self.lines = self.text.splitlines()
        self.plain = plain(self.text)
        self.functions = [(name, parameters, body.count("\n") + 2 + parameters.count("\n"), bool(static))
                          for static, name, parameters, body in FUNCTION.findall(self.plain)]
        self.noted = re.match(r"/\* SPDX[^\n]*\n\n/\*", self.text) is not None
        self.comment = sum(1 for a, b in zip(self.lines, self.plain.splitlines()) if a.strip() and not b.strip())


def sources(root):
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SOURCES and path.is_file():
                source = Source(root, path)
                source.folder = folder
                yield source


def n_parameters(text):
    return 0 if text.strip() in ("", "void") else text.count(",") + 1


# ---- circles ----------------------------------------------------------------------------------------------------


def dependencies(files):
    """{file: {other: names}} among files."""
    defines, private = collections.defaultdict(set), {}
    for f in files:
        private[f.path] = {name for name, _, _, static in f.functions if static}
        for name, _, _, static in f.functions:
            if not static:
                defines[name].add(f.path)
        for name in OBJECT.findall(f.plain):
            defines[name].add(f.path)
    graph = {f.path: collections.defaultdict(set) for f in files}
    for f in files:
        for name in set(WORD.findall(f.plain)) - private[f.path]:
            owners = defines.get(name, ())
            if len(owners) == 1 and f.path not in owners:
                graph[f.path][next(iter(owners))].add(name)
    return graph


def circles(graph):
    """Strongly connected components of more than one file, largest first (Tarjan)."""
    index, low, stack, found, counter = {}, {}, [], [], itertools.count()

    def visit(node):
        index[node] = low[node] = next(counter)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    sys.setrecursionlimit(10000)
    for node in graph:
        if node not in index:
            visit(node)
    return sorted(found, key=len, reverse=True)


# ---- structs, duplicates ----------------------------------------------------------------------------------------


def fields(files, name):
    for f in files:
        match = re.search(r"^struct %s \{\n(.*?)^\};?" % name, f.plain, re.S | re.M)
        if match:
            body = re.sub(r"\([^()]*\)\(.*?\)", "f", re.sub(r"\{[^{}]*\}", "", match.group(1)), flags=re.S)
            return sum(part.count(",") + 1 for part in body.split(";") if part.strip())
    return 0


def foreign_fields(files):
    """{field of struct space: mentions outside its folder}"""
    return collections.Counter(field for f in files if f.folder == "store" and not f.path.startswith(OWNER)
                               for field in re.findall(r"\bspace->(\w+)", f.plain))


def hooks(files):
    """{member of struct hooks: how many parts set it}"""
    for f in files:
        match = re.search(r"^struct hooks \{\n(.*?)^\};", f.plain, re.S | re.M)
        if match:
            rows = [row for g in files if g.folder == "store"
                    for row in re.findall(r"^const struct hooks \w+_hooks = \{(.*?)\};", g.plain, re.S | re.M)]
            return {name: sum(f".{name} =" in row for row in rows) for name in re.findall(r"\(\*(\w+)\)", match.group(1))}
    return {}


def lone(files):
    return [name for name, n in hooks(files).items() if n == 1]


def named(root):
    """{method: files of the product that name it}"""
    table = root / METHODS
    methods = re.findall(r"^KVD_METHOD\((\w+),", table.read_text(), re.M) if table.exists() else []
    texts = [path.read_bytes().lower() for folder in PRODUCT for path in (root / folder).rglob("*")
             if path.is_file() and path.suffix not in (".pyc", ".so") and "/." not in f"/{path.relative_to(root)}"]
    return {method: sum(method.encode() in text for text in texts) for method in methods}


def duplicates(files):
    """(first, second, lines) of runs that occur twice; each line is counted once."""
    windows, result, used = {}, [], set()
    for f in files:
        code = [(i, re.sub(r"\b[a-z]\w{0,2}\b|\s", "", line)) for i, line in enumerate(f.plain.splitlines(), 1)]
        code = [(i, line) for i, line in code if len(line) > 1 and not line.startswith("#")]
        at = 0
        while at + DUPLICATE <= len(code):
            key = tuple(line for _, line in code[at:at + DUPLICATE])
            first = windows.setdefault(key, (f, code, at))
            if first[:1] == (f,) and first[2] + DUPLICATE > at:
                at += 1
                continue
            n = 0
            while at + n < len(code) and first[2] + n < len(first[1]) and code[at + n][1] == first[1][first[2] + n][1]:
                n += 1
            if (f.path, code[at][0]) not in used and sum(len(line) for _, line in code[at:at + n]) > 120:
                used.update((f.path, i) for i, _ in code[at:at + n])
                result.append((f"{first[0].path}:{first[1][first[2]][0]}", f"{f.path}:{code[at][0]}", n))
            at += n
    return sorted(result, key=lambda it: -it[2])


# ---- what is printed --------------------------------------------------------------------------------------------


def quantile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0


def size_row(name, files):
    lengths = [len(f.lines) for f in files if f.path.endswith((".c", ".cu"))]
    spans = [lines for f in files for _, _, lines, _ in f.functions]
    wide = sum(len(line) > COLUMNS for f in files for line in f.lines)
    total = sum(len(f.lines) for f in files)
    many = sum(n_parameters(parameters) >= 6 for f in files for _, parameters, _, _ in f.functions)
    return (name, total, len(lengths), len(files) - len(lengths), statistics.median(lengths) if lengths else 0,
            quantile(lengths, .9), max(lengths, default=0), len(spans), statistics.median(spans) if spans else 0,
            quantile(spans, .9), max(spans, default=0), many, f"{100 * sum(f.comment for f in files) / total:.0f} %",
            f"{100 * wide / total:.1f} %")


def table(head, rows):
    rows = [tuple(str(cell) for cell in row) for row in [head, *rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                        for i, (cell, width) in enumerate(zip(row, widths))).rstrip())
    print()


def report(root, files):
    by = {folder: [f for f in files if f.folder == folder] for folder in FOLDERS}
    product = [f for f in files if f.folder != "tests"]
    table(("folder", "lines", ".c", ".h", "median", "90 %", "longest", "functions", "median", "90 %", "longest",
           "6+ par.", "comment", f"> {COLUMNS} col."),
          [size_row(name, by[name]) for name in FOLDERS if by[name]] +
          [size_row("all but tests", product)])
    rows = []
    for folder in FOLDERS[:-1]:
        graph = dependencies([f for f in by[folder] if f.path.endswith(".c")])
        found = circles(graph)
        rows.append((folder, len(graph), sum(map(len, graph.values())), " ".join(str(len(it)) for it in found) or "-"))
    table(("dependencies", "files", "arrows", "files of each circle"), rows)
    table(("struct", "fields"), [(name, fields(by[folder], name)) for name, folder in STRUCTS.items()])
    foreign = foreign_fields(files)
    table(("foreign fields of struct space", "mentions"),
          [*foreign.most_common(6), ("all", sum(foreign.values()))])
    table(("hooks", "members", "set by one part"), [("store/hooks.h", len(hooks(files)), len(lone(files)))])
    table(("method", "files that name it"), named(root).items())
    rows = []
    for name, some in (("all but tests", product), ("tests", by["tests"])):
        found = duplicates(some)
        rows.append((name, len(found), sum(n for _, _, n in found), found[0][2] if found else 0))
    table(("duplicates", "runs", "lines", "longest"), rows)


def exceeded(root, files):
    for name, limit in LIMITS.items():
        kind, _, what = name.partition(" ")
        if kind == "circle":
            found = circles(dependencies([f for f in files if f.folder == what and f.path.endswith(".c")]))
            if found and len(found[0]) > limit:
                yield f"{what}: a circle of {len(found[0])} files (at most {limit}): {' '.join(found[0])}"
        elif kind == "fields":
            n = fields([f for f in files if f.folder == STRUCTS[what]], what)
            if n > limit:
                yield f"struct {what} has {n} fields (at most {limit})"
        elif kind == "foreign":
            n = sum(foreign_fields(files).values())
            if n > limit:
                yield f"fields of struct space are mentioned {n} times outside {OWNER} (at most {limit})"
        elif kind == "lone":
            if len(lone(files)) > limit:
                yield f"{len(lone(files))} members of struct hooks are set by one part (at most {limit}): {' '.join(lone(files))}"
        elif kind == "method":
            for method, n in named(root).items():
                if n > limit.get(method, FEW):
                    yield f"{n} files name {method} (at most {limit.get(method, FEW)}): name what code does, or use {METHODS}"
        elif kind == "notes":
            for f in files:
                if f.folder != "tests" and f.path.endswith(".c") and not f.noted:
                    yield f"{f.path}: no note at the top says what it is"
        else:
            for f in files:
                for function, _, lines, _ in f.functions if f.folder != "tests" else ():
                    if lines > limit:
                        yield f"{f.path}: {function} has {lines} lines (at most {limit})"


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "store").mkdir()
        note, ring = "/* SPDX */\n\n/* What it is. */\n", "abcdef"
        for one, other in zip(ring, ring[1:] + ring[0]):
            (root / "store" / f"{one}.c").write_text(f"{note}int {one}(void) {{\n        return {other}(); /* g() */\n}}\n")
        (root / "store" / "g.c").write_text(note + "int g(int x,\n      int y) {\n" + "        x++;\n" * 60 + "}\n")
        same = "".join(f"        call_number_{i}(first_thing, second_thing);\n" for i in range(9))
        (root / "store" / "h.h").write_text("struct space {\n" + "        int a, b; /* c; */\n" * 15 + "};\n")
        (root / "store" / "i.c").write_text("void i(void) {\n" + same + "}\n\nvoid k(void) {\n" + same + "}\n")
        (root / OWNER).mkdir()
        (root / OWNER / "own.h").write_text("int own(struct space *space) { return space->own; }\n")
        (root / "store" / "far.h").write_text("/* space->no */\nint far(struct space *space) { return space->far; }\n")
        (root / "store" / "hooks.h").write_text("struct hooks {\n        int (*once)(void);\n        int (*twice)(void);\n};\n")
        for part, members in (("one", (".once", ".twice")), ("two", (".twice",))):
            (root / "store" / f"{part}.h").write_text(f"const struct hooks {part}_hooks = {{\n" + "".join(
                f"        {member} = here,\n" for member in members) + "};\n")
        (root / "ipc" / "base").mkdir(parents=True)
        (root / METHODS).write_text("KVD_METHOD(sixth, 1)\nKVD_METHOD(few, 0)\n")
        for i in range(FEW):
            (root / "store" / f"names{i}.py").write_text("Sixth = 6\n")
        files = list(sources(root))
        found = list(exceeded(root, files))
        assert foreign_fields(files) == {"far": 1} and lone(files) == ["once"], (foreign_fields(files), lone(files))
        LIMITS.update(foreign=0)
        assert ["mentioned 1 times outside" in line for line in exceeded(root, files) if line not in found] == [True], found
        assert [any(part in line for line in found) for part in
                ("circle of 6", "30 fields", "g has 63", "i.c: no note", "set by one part (at most 0): once",
                 "26 files name sixth (at most 25)")] == [True] * 6 == [True] * len(found), found
        assert [n for _, _, n in duplicates([f for f in files if f.path.endswith("i.c")])] == [10]


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    root = pathlib.Path(arguments[0])
    files = list(sources(root))
    if arguments[1:] != ["--limits"]:
        return report(root, files)
    return "\n".join(exceeded(root, files)) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
