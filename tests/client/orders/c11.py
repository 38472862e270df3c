#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""C11's memory model for programs of a few accesses. Tries every execution that the model allows.

The axioms are those of RC11 (Lahav and others, "Repairing Sequential Consistency in C/C++11", PLDI 2017), which C++20 has
adopted, without the one against out-of-thin-air values: ARM reorders a load with a later store, and a compiler may, too.

A program is a list of threads, a thread a list of accesses:

    ("W", place, value, order)      a store
    ("R", place, register, order)   a load
    ("X", place, value, order)      an exchange; ("X", place, value, order, register)
    ("A", place, addend, order)     an atomic addition
    ("F", order)                    a fence
"""
import sys
from itertools import permutations, product

ACQUIRES, RELEASES = {"acquire", "acq_rel", "seq_cst"}, {"release", "acq_rel", "seq_cst"}


class Event:
    def __init__(self, thread, kind, place=None, order="relaxed", value=None, register=None, addend=None):
        self.thread, self.kind, self.place, self.order = thread, kind, place, order
        self.value, self.register, self.addend = value, register, addend
        self.twin = None    # of the load of a read-modify-write: the event of its store


def events_of(program, initial):
    """Lists of events in program order: the initial stores first, then one list per thread."""
    threads = [[Event(-1, "W", place, value=value) for place, value in initial.items()]]
    for number, accesses in enumerate(program):
        events = []
        for access in accesses:
            kind, rest = access[0], access[1:]
            if kind == "F":
                events.append(Event(number, "F", order=rest[0]))
            elif kind == "W":
                events.append(Event(number, "W", rest[0], rest[2], value=rest[1]))
            elif kind == "R":
                events.append(Event(number, "R", rest[0], rest[2], register=rest[1]))
            else:
                load = Event(number, "R", rest[0], rest[2], register=rest[3] if len(rest) > 3 else None)
                store = Event(number, "W", rest[0], rest[2], value=rest[1] if kind == "X" else None,
                              addend=rest[1] if kind == "A" else None)
                load.twin = store
                events += [load, store]
        threads.append(events)
    return threads


def after(pairs, n):
    """The transitive closure, as a list of bit sets."""
    rows = [0] * n
    for a, b in pairs:
        rows[a] |= 1 << b
    for k in range(n):
        for i in range(n):
            if rows[i] >> k & 1:
                rows[i] |= rows[k]
    return rows


def pairs_of(rows):
    return {(a, b) for a, row in enumerate(rows) for b in range(len(rows)) if row >> b & 1}


def join(first, second):
    by_begin = {}
    for a, b in second:
        by_begin.setdefault(a, set()).add(b)
    return {(a, c) for a, b in first for c in by_begin.get(b, ())}


def is_cyclic(pairs, n):
    return any(row >> i & 1 for i, row in enumerate(after(pairs, n)))


class Execution:
    def __init__(self, events, program_order, reads_from, store_orders):
        self.e, self.n, self.sb = events, len(events), program_order
        self.rf = {(w, r) for r, w in reads_from.items()}
        self.rmw = {(i, events.index(e.twin)) for i, e in enumerate(events) if e.twin}
        self.mo = {(a, b) for order in store_orders for i, a in enumerate(order) for b in order[i + 1:]}
        self.fr = {(r, b) for w, r in self.rf for a, b in self.mo if a == w and b != r}

    def same_place(self, pairs, same=True):
        return {(a, b) for a, b in pairs if (self.e[a].place == self.e[b].place) == same
                and self.e[a].place and self.e[b].place}

    def keep(self, pairs, first=lambda e: True, second=lambda e: True):
        return {(a, b) for a, b in pairs if first(self.e[a]) and second(self.e[b])}

    def synchronizes(self):
        fences = {(i, i) for i in range(self.n)}
        release = self.keep(fences, lambda e: e.order in RELEASES and e.kind != "R")
        before = release | join(self.keep(release, lambda e: e.kind == "F"), self.sb)
        writes = self.keep(fences, lambda e: e.kind == "W")
        sequence = join(writes, writes | self.same_place(self.keep(self.sb, second=lambda e: e.kind == "W")))
        chain = pairs_of(after(join(self.rf, self.rmw), self.n)) | fences
        read = join(join(join(before, sequence), chain), self.rf)
        acquire = self.keep(fences, second=lambda e: e.order in ACQUIRES and e.kind != "W")
        return join(read, acquire | join(self.sb, self.keep(acquire, lambda e: e.kind == "F")))

    def is_allowed(self):
        eco = pairs_of(after(self.rf | self.mo | self.fr, self.n))
        hb = pairs_of(after(self.sb | self.synchronizes(), self.n))
        if any(a == b for a, b in hb | join(hb, eco)):
            return False
        if self.rmw & join(self.fr, self.mo):
            return False
        return not is_cyclic(self.order_of_seq_cst(hb, eco), self.n)

    def order_of_seq_cst(self, hb, eco):
        apart = self.same_place(self.sb, same=False)
        scb = self.sb | join(join(apart, hb), apart) | self.same_place(hb) | self.mo | self.fr
        sc = {(i, i) for i, e in enumerate(self.e) if e.order == "seq_cst" and e.kind != "F"}
        fence = {(i, i) for i, e in enumerate(self.e) if e.order == "seq_cst" and e.kind == "F"}
        begins, ends = sc | fence | join(fence, hb), sc | fence | join(hb, fence)
        between = hb | join(join(hb, eco), hb)
        return join(join(begins, scb), ends) | join(join(fence, between), fence)


def values(events, reads_from):
    """The value of each store; None if a value depends on itself."""
    source = {events.index(e.twin): i for i, e in enumerate(events) if e.twin}
    found = {i: e.value for i, e in enumerate(events) if e.kind == "W" and e.value is not None}
    for _ in events:
        for i, load in source.items():
            if i not in found and reads_from[load] in found:
                found[i] = found[reads_from[load]] + events[i].addend
    return found if all(i in found for i, e in enumerate(events) if e.kind == "W") else None


def outcomes(program, initial):
    """All possible final values of the registers, as a list of dictionaries."""
    threads = events_of(program, initial)
    events = [e for thread in threads for e in thread]
    number = {id(e): i for i, e in enumerate(events)}
    order = {(number[id(a)], number[id(b)]) for thread in threads[1:] for i, a in enumerate(thread) for b in thread[i + 1:]}
    order |= {(number[id(a)], number[id(b)]) for a in threads[0] for thread in threads[1:] for b in thread}
    writes = {place: [i for i, e in enumerate(events) if e.kind == "W" and e.place == place] for place in initial}
    reads = [i for i, e in enumerate(events) if e.kind == "R"]
    seen = []
    for choice in product(*[writes[events[r].place] for r in reads]):
        reads_from = dict(zip(reads, choice))
        stored = values(events, reads_from)
        if stored is None:
            continue
        result = {events[r].register: stored[w] for r, w in reads_from.items() if events[r].register}
        if result in seen:
            continue
        for store_orders in product(*[[(w[0],) + p for p in permutations(w[1:])] for w in writes.values()]):
            if Execution(events, order, reads_from, store_orders).is_allowed():
                seen.append(result)
                break
    return seen


# ---- known results ---------------------------------------------------------------------------------


def both(first, second, fence=None):
    """Two stores, each followed by a load of the other's place."""
    between = [("F", fence)] if fence else []
    return [[("W", "x", 1, first), *between, ("R", "y", "a", second)], [("W", "y", 1, first), *between, ("R", "x", "b", second)]]


def message(first, second):
    return [[("W", "x", 1, "relaxed"), ("W", "y", 1, first)], [("R", "y", "a", second), ("R", "x", "b", "relaxed")]]


def four(order):
    """Two readers see two stores in different orders."""
    return [[("W", "x", 1, order)], [("W", "y", 1, order)], [("R", "x", "a", order), ("R", "y", "b", order)],
            [("R", "y", "c", order), ("R", "x", "d", order)]]


KNOWN = [   # program, final values to look for, whether C11 allows them
    (both("seq_cst", "seq_cst"), {"a": 0, "b": 0}, False),
    (both("seq_cst", "acquire"), {"a": 0, "b": 0}, True),
    (both("release", "acquire"), {"a": 0, "b": 0}, True),
    (both("relaxed", "relaxed", "seq_cst"), {"a": 0, "b": 0}, False),
    (both("relaxed", "relaxed", "acq_rel"), {"a": 0, "b": 0}, True),
    (message("release", "acquire"), {"a": 1, "b": 0}, False),
    (message("relaxed", "acquire"), {"a": 1, "b": 0}, True),
    (message("release", "relaxed"), {"a": 1, "b": 0}, True),
    (four("seq_cst"), {"a": 1, "b": 0, "c": 1, "d": 0}, False),
    (four("acq_rel"), {"a": 1, "b": 0, "c": 1, "d": 0}, True),
    ([[("R", "x", "a", "relaxed"), ("W", "y", 1, "relaxed")], [("R", "y", "b", "relaxed"), ("W", "x", 1, "relaxed")]],
     {"a": 1, "b": 1}, True),
    ([[("R", "x", "a", "relaxed"), ("W", "y", 1, "release")], [("R", "y", "b", "acquire"), ("W", "x", 1, "relaxed")]],
     {"a": 1, "b": 1}, False),
    ([[("A", "x", 1, "relaxed")], [("A", "x", 1, "relaxed"), ("R", "x", "a", "relaxed")]], {"a": 0}, False),
    ([[("A", "x", 1, "relaxed", "a")], [("A", "x", 1, "relaxed", "b")]], {"a": 0, "b": 0}, False),
    # a store that is only a release does not take part in the order of the exchange after it
    ([[("W", "x", 1, "release"), ("X", "y", 2, "seq_cst", "a")], [("X", "y", 1, "seq_cst", "b"), ("R", "x", "c", "acquire")]],
     {"a": 0, "b": 2, "c": 0}, False),
    ([[("W", "x", 1, "release"), ("X", "y", 2, "seq_cst", "a")], [("W", "y", 1, "seq_cst"), ("R", "x", "c", "seq_cst")]],
     {"a": 0, "c": 0}, True),
]


def main():
    wrong = [n for n, (program, result, allowed) in enumerate(KNOWN) if (result in outcomes(program, {"x": 0, "y": 0})) != allowed]
    print(f"{len(KNOWN)} programs, wrong about: {wrong or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
