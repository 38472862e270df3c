#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks store, client and ipc in many places, one at a time, and counts the mutants that the suite does not catch.

    mutants.py --build DIR [--seed N] [--count N] [--again FILE] [--only N,N...] [--seconds N] [--longest N]
               [--jobs N] [--sanitized] [--list]
    mutants.py --self-test

    --build DIR  where the mutated sources, their build and results.json are kept
    --seed N     draws the places (default 1); an unchanged place is drawn again when sources around it change
    --count N    number of mutants (default 200)
    --again FILE  reads the mutants from FILE instead of drawing them: lines as in --list and survivors.txt
    --only N,N   runs only these numbers
    --seconds N  ends the run after this time, as Ctrl-C does
    --longest N  skips tests that take longer, in seconds (default 240)
    --list       prints the mutants and runs nothing

All mutants are in one build, and an environment variable turns one on (mutant.h). First every test runs without
mutants: a test that fails twice is not used, and each test records which mutants it reaches and, if that can be seen
without the mutant, would make a difference to. Then these tests run with the mutant until one fails or hangs, passes
at once without it, and fails with it again. The mutant survives if no test does. The test that caught it the last time
runs first, then quick tests, and those that have caught others in its folder. A busy machine makes no test hang: while
a test's threads wait for a processor, its clock is stopped.

Each result of a test is saved at once. It is valid as long as the test's programs and scripts are unchanged to the
byte: the same command continues an interrupted run, and only new tests run after tests were added. An interrupted run
gives no figure, because mutants that are caught quickly are judged first; its exit status is 3. The exit status of a
complete run is 0 if at least 95 of 100 are caught, else 1.

With --sanitized, the survivors are run once more by the same tests in a build with the address and undefined behaviour
sanitizers, like the variant asan of tools/test --full and --night. It takes some hours, since all tests that reach a
survivor run.

Not mutated are store/check (it judges the others), texts for people (refusals, logs, describe.c) and code that only
affects speed (prefetches, madvise, sizes of batches, alignments). A missing free() is found by the leak checks of that
variant, a missing lock by ThreadSanitizer. The 0 of an int function's `return 0`, and that of an `int r` that it
returns, becomes an error, not 1, because callers check for less than 0.
"""
from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.dont_write_bytecode = True

from places import Place, mutated, places_of  # noqa: E402
from running import Stopped, Test, Time  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("store", "client", "ipc")
NOT_MUTATED = ("store/check/", "store/refuse.c", "client/conn/error.c", "ipc/describe.c", "ipc/base/why.c")
SUITES = ("ipc", "fuzz", "store", "client", "daemon", "device", "inproc", "killpoints", "hostile", "soak", "kvctl",
          "python", "kvlm", "methods", "fakecuda", "systemd")
NOT_RUN = ("bench-runs", "catches-no", "catches-look") # tests of speed, or of broken copies
LONGEST = 240           # seconds, by default: a longer test would run for every survivor that it reaches
PRODUCT = ("daemon/kvd", "tools/kvctl/kvctl", "tools/kvlm/kvlm", "client/libkvd.so.0", "kernels/libkvd_kernels.so.0")
SETUP = ["-Dcuda=disabled", "-Dbuildtype=debugoptimized", "-Dtests=enabled"]
SANITIZED = ["-Db_sanitize=address,undefined", "-Db_lundef=false"]
SLOWER = 5              # times, at most, with sanitizers


class Mutant:
    def __init__(self, number: int, place: Place, source: str, what: str, other: str):
        self.number, self.place, self.what, self.other = number, place, what, other
        self.where = f"{place.path}:{place.line(source)}"
        self.key = f"{place.path} {place.function} {place.nth}: {place.text} -> {other or what}"
        self.judged, self.caught = False, ""    # caught: by which test, and how

    def __str__(self) -> str:
        return f"{self.number:3} {self.where} {named(self.place, self.what)}"


def named(place: Place, what: str) -> str:
    return f"{place.function}: {what}: {' '.join(place.text.split())[:90]}"


def read_sources(root: Path) -> dict[str, str]:
    found = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.c")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(NOT_MUTATED):
                found[name] = path.read_text()
    return found


def draw(sources: dict[str, str], seed: int, count: int) -> list[Mutant]:
    """Draws places, and one change of each. A place's rank depends on the place alone, not on other places, so that
    survivors are still drawn after tests were added that catch them."""
    drawn = []
    for name, source in sources.items():
        for place in places_of(name, source):
            drawn.append((random.Random(repr((seed, name, place.function, place.text, place.nth))), place))
    ranked = sorted(((dice.random(), n, dice, place) for n, (dice, place) in enumerate(drawn)), key=lambda d: d[:2])
    return [Mutant(n, place, sources[place.path], *dice.choice(place.mutations()))
            for n, (_, _, dice, place) in enumerate(ranked[:count])]


def read_again(sources: dict[str, str], file: Path) -> list[Mutant]:
    """The listed mutants that the sources still have."""
    wanted = {}
    for line in file.read_text().splitlines():
        match = re.match(r"\s*\d+ ([\w/.-]+):\d+ (.*?)(?:  -- .*|   \(no test reaches it\))?$", line)
        if match:
            wanted[match[1], match[2]] = line
    found = []
    for path in {path for path, _ in wanted if path in sources}:
        for place in places_of(path, sources[path]):
            for what, other in place.mutations():
                if wanted.pop((path, named(place, what)), None):
                    found.append((path, place, what, other))
    for line in wanted.values():
        print(f"no longer there: {line}")
    found.sort(key=lambda f: (f[0], f[1].begin))
    return [Mutant(n, place, sources[path], what, other) for n, (path, place, what, other) in enumerate(found)]


def write_sources(root: Path, copy: Path, mutants: list[Mutant]) -> None:
    """Writes the tree with all mutants in it. Unchanged files keep their times."""
    files = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], check=True, text=True,
                           stdout=subprocess.PIPE).stdout.split("\n")
    by_path: dict[str, list] = {}
    for m in mutants:
        by_path.setdefault(m.place.path, []).append((m.place, m.number, m.other))
    for name in filter(lambda f: f and (root / f).is_file(), files):
        text = (root / name).read_bytes()
        if name in by_path:
            text = mutated(text.decode(), by_path[name]).encode()
        if not (copy / name).exists() or (copy / name).read_bytes() != text:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(text)
            shutil.copymode(root / name, copy / name)


class Answers:
    """The results of tests, in a file: for each mutant and test, the test's digest (Test.made_of), and how it failed,
    or "" if it passed."""

    def __init__(self, file: Path):
        self.file, self.lock = file, threading.Lock()
        self.known: dict[str, dict[str, list[str]]] = json.loads(file.read_text()) if file.exists() else {}

    def of(self, mutant: Mutant, test: Test) -> str | None:
        """None if the test has not run, or has changed since."""
        made_of, how = self.known.get(mutant.key, {}).get(test.name, ("", ""))
        return how if made_of == test.made_of else None

    def caught_before(self, mutant: Mutant, test: Test) -> bool:
        """True also if an older version of the test caught it."""
        return bool(self.known.get(mutant.key, {}).get(test.name, ("", ""))[1])

    def keep(self, mutant: Mutant, test: Test, how: str) -> None:
        with self.lock:
            self.known.setdefault(mutant.key, {})[test.name] = [test.made_of, how]
            self.file.with_suffix(".new").write_text(json.dumps(self.known, indent=1) + "\n")
            self.file.with_suffix(".new").replace(self.file)


class Build:
    """The mutated tree, built, and its tests."""

    def __init__(self, folder: Path, jobs: int, longest: int, name: str = "", options: list[str] | None = None):
        self.source, self.build, self.scratch = folder / "source", folder / f"build{name}", folder / "scratch"
        self.log, self.jobs, self.longest, self.tests = folder / f"build{name}.log", jobs, longest, []
        self.known, self.caught_in = folder / "known.json", collections.Counter()
        self.answers, self.options = Answers(folder / f"answers{name}.json"), [*SETUP, *(options or [])]
        for path in (self.source, self.scratch):
            path.mkdir(parents=True, exist_ok=True)

    def make(self) -> None:
        is_set_up = (self.build / "build.ninja").exists()
        set_up = ["ninja", "-C", self.build, "build.ninja"] if is_set_up else \
            ["meson", "setup", *self.options, self.build, self.source]
        with open(self.log, "w") as log:
            subprocess.run(set_up, check=True, stdout=log, stderr=log) # before tests are listed, as some may be new
            known = json.loads(subprocess.run(["meson", "introspect", "--tests", "--targets", "-f", self.build], check=True,
                                              stdout=subprocess.PIPE).stdout)
            self.tests = [Test(t, self.build) for t in known["tests"] if self.is_asked(t)]
            files = {t["id"]: t["filename"] for t in known["targets"]}
            wanted = sorted({os.path.relpath(file, self.build.resolve())
                             for t in self.tests for target in t.needs for file in files[target]})
            subprocess.run(["ninja", "-C", self.build, *wanted], check=True, stdout=log, stderr=log)
        digests = {}
        for test in self.tests:
            test.made_of = self.digest([self.build / file for target in test.needs for file in files[target]], test, digests)

    def digest(self, programs: list[Path], test: Test, digests: dict[Path, str]) -> str:
        """A digest of the test's programs, of all product programs and libraries, and of scripts in its folders."""
        found = {path for path in (*programs, *(self.build / file for file in PRODUCT)) if path.is_file()}
        for script in (Path(word) for word in test.command if word.endswith((".py", ".sh")) and Path(word).is_file()):
            for folder in (script.parent, self.source / "tests/lib", self.source / "client/python"):
                found |= {path for path in folder.rglob("*") if path.suffix in (".py", ".sh")}
        for path in found - digests.keys():
            digests[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        return hashlib.sha256("".join(sorted(digests[path] for path in found)).encode()).hexdigest()[:16]

    @staticmethod
    def is_asked(known: dict) -> bool:
        suites = {suite.split(":")[-1] for suite in known["suite"]}
        return bool(suites & set(SUITES)) and not suites & {"long"} and \
            not any(part in known["name"] for part in NOT_RUN)

    def without_mutants(self) -> None:
        """Finds which tests pass, how long each takes, and what it reaches. Unchanged tests keep their results."""
        known = json.loads(self.known.read_text()) if self.known.exists() else {}
        for test in self.tests:
            test.remember(known.get(f"{test.name} {test.made_of}"))
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            asked = {pool.submit(t.passes_as_it_is, self.scratch, self.longest + 1): t for t in self.tests}
            for future in concurrent.futures.as_completed(asked):
                test, result = asked[future], future.result()
                test.passes = not result
                known[f"{test.name} {test.made_of}"] = [test.seconds, result, [n for n, seen in enumerate(test.seen) if seen]]
                self.known.write_text(json.dumps(known))
                if test.seconds > self.longest:
                    print(f"not asked: {test.name}, which takes more than {self.longest} s", flush=True)
                elif result:
                    print(f"not asked: {test.name}, which does not pass as it is ({result})", flush=True)
        self.tests = sorted((t for t in self.tests if t.passes and t.seconds <= self.longest), key=lambda t: t.seconds)
        print(f"{len(self.tests)} tests, {sum(t.seconds for t in self.tests):.0f} s without mutants; the longest: "
              + ", ".join(f"{t.name} {t.seconds:.0f} s" for t in self.tests[-8:]), flush=True)

    def reaches_what(self, other: Build) -> None:
        """Takes over what the tests reach in another build of the same sources."""
        known = {t.name: t for t in other.tests}
        self.tests = [t for t in self.tests if t.name in known]
        for test in self.tests:
            test.seconds, test.seen = known[test.name].seconds * SLOWER, known[test.name].seen

    def order(self, mutant: Mutant) -> list[Test]:
        """The tests that reach the mutant, in an order that catches it quickly."""
        folder = Path(mutant.place.path).parent
        return sorted((t for t in self.tests if t.seen[mutant.number]),
                      key=lambda t: (not self.answers.caught_before(mutant, t),
                                     t.seconds / (1 + 3 * self.caught_in[t.name, folder])))

    def recall(self, mutant: Mutant) -> bool:
        """Judges the mutant by saved results, if they suffice."""
        said = {t.name: self.answers.of(mutant, t) for t in self.order(mutant)}
        mutant.caught = next((f"{name} ({how})" for name, how in said.items() if how), "")
        mutant.judged = bool(mutant.caught) or None not in said.values()
        return mutant.judged

    def judge(self, mutant: Mutant) -> Mutant:
        with contextlib.suppress(Stopped):
            for test in self.order(mutant):
                Time.look()
                how = self.answers.of(mutant, test)
                if how is None:
                    how = test.notices(mutant.number, self.scratch)
                    self.answers.keep(mutant, test, how)
                if how:
                    self.caught_in[test.name, Path(mutant.place.path).parent] += 1
                    break
        self.recall(mutant)
        return mutant

    def judge_all(self, mutants: list[Mutant]) -> None:
        anew = [m for m in mutants if not self.recall(m)]
        print(f"{len(mutants) - len(anew)} of {len(mutants)} were judged before", flush=True)
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            for future in concurrent.futures.as_completed([pool.submit(self.judge, m) for m in anew]):
                m = future.result()
                if m.judged:
                    print(f"{sum(one.judged for one in mutants)}/{len(mutants)} "
                          f"{'caught by ' + m.caught if m.caught else 'SURVIVES'}: {m}", flush=True)


def judge_survivors(build: Build, sanitized: Build, survivors: list[Mutant]) -> None:
    for m in survivors:
        m.judged = False        # stays so if the time is over
    if survivors:
        Time.look()
        print(f"{len(survivors)} survive, and are judged with sanitizers", flush=True)
        sanitized.make()
        sanitized.reaches_what(build)
        sanitized.judge_all(survivors)


def report(build: Build, mutants: list[Mutant], seed: int) -> int:
    judged = [m for m in mutants if m.judged]
    survivors = [m for m in judged if not m.caught]
    reached = {m.number for m in mutants for t in build.tests if t.seen[m.number]}
    print(f"\nsurvivors of seed {seed}:")
    for m in survivors:
        print(f"{m}{'' if m.number in reached else '   (no test reaches it)'}")
    if len(judged) < len(mutants):
        print(f"Ended before all were judged: {len(mutants) - len(judged)} of {len(mutants)} are left, {len(survivors)} "
              "survive. The same command goes on.")
        print(json.dumps({"judged": len(judged), "seed": seed}))
        return 3
    print(json.dumps({"mutants": len(judged), "caught": len(judged) - len(survivors), "seed": seed,
                      "hang": sum("hangs" in m.caught for m in judged),
                      "not_reached": sum(m.number not in reached for m in judged)}))
    return 0 if judged and len(judged) - len(survivors) >= 0.95 * len(judged) else 1


SAMPLE = """
/* if (no) */
static int f(struct s *s, uint32_t n) {
        uint32_t m = n + 1, k;

        if (n < s->n && "a < b")
                return -EINVAL;
        for (uint32_t i = 0; i < n; i++)
                s->a[i] = g(i,
                            0);
        log_info("%u", n);
        return store_refuse(s, -ENOENT, "no (");
}

static int g(struct s *s) {
        unsigned long long id;
        int n = 0, r = s ? 0 : f(s);

        pthread_mutex_lock(&s->lock);
        s->n = MAX(4 * BATCH, ALIGN_UP(m, 4096));
        return r == -EAGAIN ? 0 : r;
}
"""


class Pretended:
    """A test that catches mutant 0, but not 1, and is interrupted at 2."""

    seconds, seen = 1, b"\1\1\1"

    def __init__(self, name: str, made_of: str):
        self.name, self.made_of, self.asked = name, made_of, []

    def notices(self, number: int, scratch: Path) -> str:
        self.asked.append(number)
        if number == 2 and self.asked.count(2) == 1:
            Time.end()
        Time.look()
        return "status 1" if number == 0 else ""


def test_going_on(folder: Path) -> None:
    """A run that is interrupted in its third mutant keeps two, gives no figure, and can be continued; a new test runs for
    survivors, and a changed test for all mutants."""
    def run(*tests: Pretended) -> tuple[int, str]:
        build, said, place = Build(folder, 1, LONGEST), io.StringIO(), places_of("f.c", SAMPLE)[0]
        build.tests = list(tests)
        mutants = [Mutant(n, place, SAMPLE, "1 is 2", f"n + {n}") for n in range(3)]
        Time.deadline = float("inf")
        with contextlib.redirect_stdout(said):
            build.judge_all(mutants)
            status = report(build, mutants, 1)
        return status, said.getvalue()

    test, new, changed = Pretended("one", "a"), Pretended("two", "a"), Pretended("one", "b")
    status, said = run(test)
    assert (status, test.asked) == (3, [0, 1, 2]) and "1 of 3 are left, 1 survive" in said and '"mutants"' not in said, said
    status, said = run(test)
    assert (status, test.asked) == (1, [0, 1, 2, 2]) and "2 of 3 were judged before" in said, (test.asked, said)
    assert '{"mutants": 3, "caught": 1,' in said and "caught by" not in said, said
    new.asked.append(2)
    assert run(test, new)[0] == 1 and (test.asked, new.asked) == ([0, 1, 2, 2], [2, 1, 2]), (test.asked, new.asked)
    changed.asked.append(2)
    assert run(changed)[0] == 1 and changed.asked == [2, 0, 1, 2], changed.asked


class PretendedBuild(Build):
    def make(self) -> None:
        self.tests = [Pretended("one", "sanitized"), Pretended("two", "not asked in the other build")]


def test_survivors(folder: Path) -> None:
    """Survivors are run in the sanitized build, by the tests that the plain build has used."""
    build, sanitized = Build(folder, 1, LONGEST), PretendedBuild(folder, 1, LONGEST, "-sanitized", SANITIZED)
    build.tests, place = [Pretended("one", "plain")], places_of("f.c", SAMPLE)[0]
    mutants = [Mutant(n, place, SAMPLE, "1 is 2", f"n + {n}") for n in range(2)]
    with contextlib.redirect_stdout(io.StringIO()):
        judge_survivors(build, sanitized, mutants)
    assert [(m.judged, bool(m.caught)) for m in mutants] == [(True, True), (True, False)]
    assert [(t.name, t.seconds, t.asked) for t in sanitized.tests] == [("one", SLOWER, [0, 1])]


def self_test() -> None:
    for test in (test_going_on, test_survivors):
        with tempfile.TemporaryDirectory() as folder:
            test(Path(folder))
    found = places_of("f.c", SAMPLE)
    assert [(p.kind, p.text) for p in found] == [
        ("value", "n + 1"), ("condition", 'n < s->n && "a < b"'), ("return", "-EINVAL"), ("condition", "i < n"),
        ("statement", "s->a[i] = g(i,\n                            0);"),
        ("return", 'store_refuse(s, -ENOENT, "no (")'), ("value", "0"), ("value", "s ? 0 : f(s)"),
        ("statement", "s->n = MAX(4 * BATCH, ALIGN_UP(m, 4096));"),
        ("return", "r == -EAGAIN ? 0 : r")], found
    assert [what for what, _ in found[-2].mutations()] == ["statement dropped"], found[-2].mutations()
    assert ("0 is -5", "r == -EAGAIN ? -5 : r") in found[-1].mutations(), found[-1].mutations()
    assert ("0 is -5", "s ? -5 : f(s)") in found[-3].mutations() and ("0 is 1", "1") in found[-4].mutations(), found[-4:]
    text = mutated(SAMPLE, [(p, n, p.mutations()[0][1]) for n, p in enumerate(found)])
    for line in ("uint32_t m = mutant_instead(0, n + 1, n - 1), k;", 'if ((mutant(1) ? (!(n < s->n && "a < b")) :',
                 "return mutant_instead(2, -EINVAL, 0);", "mutant_instead(3, i < n, !(i < n)); i++)",
                 "{ if (mutant(4)) {  } else { s->a[i]", 'mutant_instead(5, store_refuse(s, -ENOENT, "no ("), 0)',
                 "return (mutant(9) ? (r != -EAGAIN ? 0 : r) : (r == -EAGAIN ? 0 : r));"):
        assert line in text, text
    both = mutated(SAMPLE, [(found[0], 7, "1"), (found[0], 8, "2")])
    assert "uint32_t m = (mutant(8) ? (2) : (mutant_instead(7, n + 1, 1))), k;" in both, both


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=int)
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--jobs", type=int, default=4 * len(os.sched_getaffinity(0)))  # tests mostly wait
    parser.add_argument("--sanitized", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    return parser.parse_args()


def main() -> int:
    o = parse()
    if o.self_test:
        self_test()
        return 0
    sources = read_sources(ROOT)
    mutants = read_again(sources, o.again) if o.again else draw(sources, o.seed, o.count)
    if o.list:
        print(*mutants, sep="\n")
        return 0
    if not o.build:
        sys.exit("--build wants a folder")
    began = time.monotonic()
    build = Build(o.build.resolve(), o.jobs, o.longest)
    write_sources(ROOT, build.source, mutants)
    build.make()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, Time.end)
    print(f"{len(mutants)} mutants of seed {o.seed} are built, after {time.monotonic() - began:.0f} s", flush=True)
    only = {int(n) for n in o.only.split(",") if n}
    chosen = [m for m in mutants if not only or m.number in only]
    with contextlib.suppress(Stopped):
        build.without_mutants()
        Time.deadline = min(Time.deadline, began + o.seconds) if o.seconds else Time.deadline
        build.judge_all(chosen)
        if o.sanitized:
            sanitized = Build(o.build.resolve(), o.jobs, o.longest, "-sanitized", SANITIZED)
            judge_survivors(build, sanitized, [m for m in chosen if m.judged and not m.caught])
    return report(build, chosen, o.seed)


if __name__ == "__main__":
    sys.exit(main())
