#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Memory orders between two processes, by C11's rules and not by those of the processor that runs the test.

Each row has a few accesses of both sides. Their orders are read from the source, so a weaker order there is noticed here.
The forbidden result must be impossible with the source's orders. Each order that is listed as needed must be needed: with
a weaker one, C11 must allow the forbidden result.

    orders.py ROOT
"""
import pathlib
import re
import sys

from c11 import outcomes

ROOT = pathlib.Path(sys.argv[1])
CALL = re.compile(r"(?:atomic|__atomic)_(load|store|exchange|fetch_add|fetch_sub|fetch_or)")
SHM = "ipc/base/shm.h"
LAYOUT = "ipc/base/layout.h"


def text_of(path, function=None):
    text = (ROOT / path).read_text()
    if path == SHM:     # without the code for ThreadSanitizer
        text = re.sub(r"#if KVD_TSAN\n(?:(?!#else).)*?#else\n(.*?)#endif\n", r"\1", text, flags=re.S)
    if function:
        text = re.search(r"\b%s\([^;{]*\{\n.*?^\}" % function, text, re.S | re.M).group()
    return text


def access(path, what, function=None):
    """Order and kind of the only access in a file, or in one of its functions, whose statement matches."""
    found = [s for s in re.findall(r"[^;{}]*?(?:__)?atomic_[^;]*;", text_of(path, function)) if re.search(what, s)]
    if len(found) != 1:
        sys.exit(f"{path}: {len(found)} accesses instead of one match {what}")
    part = found[0][re.search(what, found[0]).start():]
    order = re.search(r"memory_order_(\w+)|__ATOMIC_(\w+)", part)
    kind = re.search(CALL, part) or re.search(r"fence", part)
    return (order.group(1) or order.group(2)).lower() if order else "seq_cst", kind.group()


# name: (file, the statement from its call on, function)
ACCESSES = {
    "posted": ("client/cache/post.c", r"atomic_\w+\(&page->posted, posted,"),
    "kick": ("client/cache/post.c", r"atomic_\w+\(&view->page->kicked, what"),
    "unkick": ("store/cache/post.c", r"atomic_\w+\(&a->page->kicked, 0"),
    "look at posted": ("store/cache/post.c", r"atomic_\w+\(&a->page->posted"),
    "taken": ("store/cache/post.c", r"atomic_\w+\(&page->posts_taken, \+\+"),
    "look at taken": ("client/internal.h", r"atomic_\w+\(&view->page->posts_taken"),
    "reason": ("store/cache/post.c", r"atomic_\w+\(&page->posts_errno"),
    "refuse": ("store/cache/post.c", r"atomic_\w+\(&page->posts_refused"),
    "look at refused": ("client/cache/post.c", r"atomic_\w+\(&view->page->posts_refused"),
    "look at reason": ("client/cache/post.c", r"atomic_\w+\(&view->page->posts_errno"),
    "use a group": (LAYOUT, r"atomic_\w+\(word, kvd_group_bit", "kvd_group_use"),
    "look at own group": (LAYOUT, r"atomic_\w+\(word, memory", "kvd_group_use"),
    "look at group": ("store/cache/users.c", r"atomic_\w+\(word, memory", "group_used"),
    "pin": ("client/internal.h", r"atomic_\w+\(&view->words\[id\]\.pins, 1", "count_pin"),
    "C5": ("client/cache/lookup.c", r"atomic_\w+\(slot, \w+\) == sealed\)"),
    "retire": ("store/cache/index.c", r"atomic_\w+\(&desc->slot, word"),
    "scan": ("store/cache/users.c", r"atomic_\w+\(&u->pages\[seat\]\[id\]\.pins"),
    "unpin": ("client/internal.h", r"atomic_\w+\(&view->words\[id\]\.pins, 1", "unpin_block"),
    "D11": ("store/cache/inherit.c", r"atomic_\w+\(&a->page->epoch"),
    "served": ("client/internal.h", r"atomic_\w+\(&view->page->epoch"),
    "leave": ("client/conn/view.c", r"atomic_\w+\(&view->page->left"),
    "look at left": ("store/cache/inherit.c", r"atomic_\w+\(&a->page->left\) && !has_died"),
    "load": (SHM, r"atomic_\w+\(\(shm_u64 \*\)word", "shm_load"),
    "load again": (SHM, r"atomic_load\w+\(\(shm_u64 \*\)word", "shm_load_again"),
    "fence of a reader": (SHM, r"atomic_thread_fence", "shm_load_again"),
    "write begins": (SHM, r"atomic_\w+\(word, invalid", "shm_write_begin"),
    "fence of a writer": (SHM, r"atomic_thread_fence", "shm_write_begin"),
    "write ends": (SHM, r"atomic_\w+\(word, valid", "shm_write_end"),
    "into the table": ("store/cache/index.c", r"atomic_\w+\(slot, kvd_table_slot"),
    "segments": ("store/cache/segment.c", r"atomic_store\w*\(&space->ix->n_segments, n \+ 1"),
    "look at segments": ("client/cache/lookup.c", r"atomic_\w+\(&view->ix->n_segments, memory"),
    "pending": ("store/cache/unready.c", r"atomic_\w+\(&space->ix->n_pending"),
    "look at pending": ("client/gpu/stream.c", r"atomic_\w+\(&view->ix->n_pending"),
    "arrive": ("store/cache/index.c", r"__atomic_\w+\(&desc->semaphore, 0"),
    "look at semaphore": ("client/gpu/stream.c", r"__atomic_\w+\(&desc->semaphore"),
    "poison": ("store/cache/unready.c", r"__atomic_\w+\(&desc->flags"),
    "release": ("store/cache/semaphore.c", r"atomic_store\w*\(word, p->highest\[at\]"),
    "look at flags": ("client/gpu/stream.c", r"__atomic_\w+\(&desc->flags"),
    "epoch": ("store/cache/epoch.c", r"atomic_\w+\(epoch, 1"),
    "look at epoch": ("client/methods/sync.c", r"atomic_\w+\(epoch"),
    "end of a lease": ("client/cache/lease.c", r"atomic_\w+\(epoch\)"),
    "depths": ("store/methods/bicache.c", r"atomic_\w+\(&ix->depth_def, def"),
    "look at depths": ("client/methods/methods.c", r"atomic_\w+\(&view->ix->depth_def"),
    "summary": ("daemon/process/worker/job_summarise.c", r"__atomic_\w+\(&to\[n - 1\]"),
    "look at summary": ("daemon/process/worker/job_summarise.c", r"__atomic_\w+\(&channels\[n - 1\]"),
}

DATA = "relaxed"


def passing(what, store, load, needs=None):
    """Message passing: a reader that sees the word sees what was written before it."""
    return (f"{what}: who sees it sees what is behind it", {"data": 0, "word": 0},
            [[("W", "data", 1, DATA), (store, "word", 1)], [(load, "word", "word"), ("R", "data", "data", DATA)]],
            lambda r: r["word"] == 1 and r["data"] == 0, needs if needs is not None else [store, load])


def giving_back(what, store, load, before, behind, needs=None):
    """The reader has finished before the other side writes."""
    return (f"{what}: nothing is written while it is read", {"data": 0, "word": before},
            [[("R", "data", "data", DATA), (store, "word", behind)], [(load, "word", "word"), ("W", "data", 2, DATA)]],
            lambda r: r["word"] == (behind if behind >= 0 else before + behind) and r["data"] == 2,
            needs if needs is not None else [store, load])


def dekker(what, one, look, other, scan, value, needs=None):
    """Both sides write, and then read the other's word. At least one sees the other's write."""
    return (f"{what}: one side sees the other", {"mine": 0, "theirs": 1},
            [[(one, "mine", 1), (look, "theirs", "theirs")], [(other, "theirs", value), (scan, "mine", "mine")]],
            lambda r: r["theirs"] == 1 and r["mine"] == 0, needs if needs is not None else [one, look, other, scan])


ROWS = [
    # The client exchanges: if it finds 1, the daemon polls. `kicked` is 1 from an earlier post.
    ("posts (R1 to R4): none is left behind", {"posted": 0, "kicked": 1},
     [[("posted", "posted", 1), ("kick", "kicked", 1, "found")], [("unkick", "kicked", 0), ("look at posted", "posted", "seen")]],
     lambda r: r["found"] == 1 and r["seen"] == 0, ["kick", "unkick"]),
    passing("a post", "posted", "look at posted"),
    giving_back("a place of the ring", "taken", "look at taken", 0, 1),
    ("a refused post: its reason is there", {"errno": 0, "refused": 0},
     [[("reason", "errno", 5), ("refuse", "refused", 1)], [("look at refused", "refused", "refused"), ("look at reason", "errno", "errno")]],
     lambda r: r["refused"] == 1 and r["errno"] == 0, ["refuse", "look at refused"]),
    dekker("a pin and eviction (C3 to C5, D2, D3)", "pin", "C5", "retire", "scan", 2),
    dekker("a group's first pin and eviction (C2b, C5, D2, D3)", "use a group", "C5", "retire", "look at group", 2),
    ("a group that another thread uses (C2b, C5, D2, D3): its pin is not passed over", {"group": 0, "slot": 1},
     [[("use a group", "group", 1)], [("look at own group", "group", "own"), ("C5", "slot", "slot")],
      [("retire", "slot", 2), ("look at group", "group", "group")]],
     lambda r: r["own"] == 1 and r["slot"] == 1 and r["group"] == 0,
     ["use a group", "look at own group", "C5", "retire", "look at group"]),
    dekker("a group's first pin and a new daemon (C2b, C5, D11)", "use a group", "served", "D11", "look at group", 2),
    dekker("a pin and a new daemon (C5, D11)", "pin", "served", "D11", "scan", 2),
    giving_back("a pinned block", "unpin", "scan", 1, -1),
    giving_back("what an old client had pinned", "leave", "look at left", 0, 1),
    passing("a word of the index (shm_write_end, shm_load)", "write ends", "load"),
    passing("an entry of the table", "into the table", "load"),
    ("a word of the index (shm_write_begin, shm_recheck): what changed meanwhile is thrown away", {"slot": 1, "data": 1},
     [[("write begins", "slot", 0), ("fence of a writer",), ("W", "data", 2, DATA), ("write ends", "slot", 2)],
      [("load", "slot", "first"), ("R", "data", "data", DATA), ("fence of a reader",), ("load again", "slot", "second")]],
     lambda r: r["first"] == r["second"] == 1 and r["data"] == 2, ["fence of a writer", "fence of a reader"]),
    ("changes, for those who follow: what was written over is noticed", {"begun": 0, "ring": 1},
     [[("write begins", "begun", 1), ("fence of a writer",), ("W", "ring", 2, DATA)],
      [("R", "ring", "id", DATA), ("fence of a reader",), ("load again", "begun", "begun")]],
     lambda r: r["id"] == 2 and r["begun"] == 0, ["fence of a writer", "fence of a reader"]),
    passing("a segment", "segments", "look at segments"),
    passing("no block is pending", "pending", "look at pending"),
    passing("a block's data", "arrive", "look at semaphore"),
    ("a dead producer's block (O6, O7): it is poisoned before it is released", {"flags": 0, "word": 0},
     [[("poison", "flags", 1), ("release", "word", 1)], [("load", "word", "word"), ("look at flags", "flags", "flags")]],
     lambda r: r["word"] == 1 and r["flags"] == 0, ["release", "load"]),
    passing("news of a sequence", "epoch", "look at epoch"),
    passing("the end of a lease", "epoch", "end of a lease"),
    passing("BiCache's table", "depths", "look at depths"),
    passing("a summary's channels", "summary", "look at summary"),
]

KINDS = {"load": "R", "store": "W", "exchange": "X", "fetch_add": "A", "fetch_sub": "A", "fetch_or": "A"}


def program(threads, orders):
    """The accesses with their kinds and orders from the source."""
    return [[resolve(a, orders) for a in thread] for thread in threads]


def resolve(a, orders):
    if a[0] not in orders:
        return a
    order, call = orders[a[0]]
    if call == "fence":
        return ("F", order)
    kind = KINDS[re.search(CALL, call).group(1)]
    return (kind, a[1], a[2], order) + a[3:]


def is_reachable(row, orders):
    name, initial, threads, bad, needs = row
    return any(bad(r) for r in outcomes(program(threads, orders), initial))


def weaker(orders, name):
    """The same orders, but with this access relaxed."""
    call = orders[name][1]
    return {**orders, name: ("relaxed", call)}


def main():
    orders = {name: access(*where) for name, where in ACCESSES.items()}
    faults = 0
    for row in ROWS:
        if is_reachable(row, orders):
            used = {a[0] for thread in row[2] for a in thread if a[0] in orders}
            print(f"C11 allows it: {row[0]}: " + ", ".join(f"{u} is {orders[u][0]}" for u in sorted(used)))
            faults += 1
        for name in row[4]:
            if not is_reachable(row, weaker(orders, name)):
                print(f"nothing depends on the order of \"{name}\": {row[0]}")
                faults += 1
    print(f"{len(ROWS)} rows, {len(orders)} accesses, {faults} faults")
    return faults > 0


sys.exit(main())
