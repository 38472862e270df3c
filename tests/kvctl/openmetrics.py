#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that a text is in Prometheus's text format, and that its figures are those of kvctl dump.

    openmetrics.py TEXT [DUMP]

read() is for OpenMetrics 1.0, and follows the ABNF of the specification for what kvctl writes (no timestamps, no
exemplars): families are described before their samples and are not interleaved, names and label names are legal, units
end names, counters end in _total, buckets rise to +Inf and agree with _count. read_plain() is for the older format.
"""
from __future__ import annotations

import json
import re
import sys

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"')
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)")
TYPES = {"gauge": {""}, "counter": {"_total"}, "info": {"_info"}, "histogram": {"_bucket", "_count", "_sum"}}


class Family:
    """The description of a name, and its samples: {(name, labels): value}."""

    def __init__(self, name: str):
        self.name, self.type, self.unit, self.help, self.samples = name, "", "", "", {}


def fail(number: int, line: str, why: str) -> None:
    raise SystemExit(f"line {number}: {why}: {line}")


def labels_of(text: str | None) -> tuple | None:
    """The labels as sorted pairs; None if they are not well-formed."""
    pairs, at = [], 0
    while text and at < len(text):
        match = LABEL.match(text, at)
        if not match or (match.end() < len(text) and text[match.end()] != ","):
            return None
        pairs.append((match[1], match[2]))
        at = match.end() + 1
    return tuple(sorted(pairs)) if len({name for name, _ in pairs}) == len(pairs) else None


def check_histogram(family: Family) -> None:
    rows: dict = {}
    for (name, labels), value in family.samples.items():
        rest = tuple(pair for pair in labels if pair[0] != "le")
        row = rows.setdefault(rest, {"le": [], "count": None, "sum": None})
        if name.endswith("_bucket"):
            row["le"].append((float(dict(labels)["le"]), value))
        else:
            row[name.rsplit("_", 1)[1]] = value
    for rest, row in rows.items():
        limits, counts = zip(*row["le"])
        good = list(limits) == sorted(set(limits)) and list(counts) == sorted(counts) and limits[-1] == float("inf")
        if not good or row["count"] != counts[-1] or row["sum"] is None:
            raise SystemExit(f"{family.name}{rest}: not a histogram: {row}")


def read(text: str) -> dict[str, Family]:
    """{name: family}; ends the program at the first wrong line."""
    families: dict[str, Family] = {}
    family = None
    if not text.endswith("\n# EOF\n"):
        raise SystemExit("the text does not end in # EOF")
    for number, line in enumerate(text.splitlines()[:-1], 1):
        meta = re.fullmatch(rf"# (TYPE|UNIT|HELP) ({NAME}) (.+)", line)
        if meta:
            if family is None or family.name != meta[2]:
                if meta[2] in families:
                    fail(number, line, "a family stands in two places")
                family = families[meta[2]] = Family(meta[2])
            key = meta[1].lower()
            if getattr(family, key) or family.samples:
                fail(number, line, "said twice, or after a sample")
            setattr(family, key, meta[3])
            if (key == "type" and meta[3] not in TYPES) or (key == "unit" and not meta[2].endswith("_" + meta[3])):
                fail(number, line, "no such type, or the name does not end in its unit")
            continue
        sample = SAMPLE.fullmatch(line)
        labels = labels_of(sample[2]) if sample else None
        if not sample or labels is None or family is None:
            fail(number, line, "not a sample of a family")
        if not sample[1].startswith(family.name) or sample[1][len(family.name):] not in TYPES[family.type]:
            fail(number, line, f"not a sample of {family.name}, a {family.type}")
        if (sample[1], labels) in family.samples:
            fail(number, line, "stands twice")
        family.samples[sample[1], labels] = float(sample[3])
    for one in families.values():
        if not one.type or not one.help:
            raise SystemExit(f"{one.name}: no type, or no help")
        if one.type == "histogram":
            check_histogram(one)
    return families


def read_plain(text: str) -> dict[str, Family]:
    """The older format: families are named as their samples, of gauges, counters and histograms, without units."""
    lines, counters = [], {}
    for line in text.splitlines():
        meta = re.fullmatch(rf"# (TYPE|HELP) ({NAME}) (.+)", line)
        if line.startswith("#") and (not meta or (meta[1] == "TYPE" and meta[3] not in ("gauge", "counter", "histogram"))):
            raise SystemExit(f"not in this format: {line}")
        if meta and meta[1] == "TYPE":
            counters[meta[2]] = meta[3] == "counter"
        lines.append(line)
    for name, counter in counters.items():
        if counter != name.endswith("_total"):
            raise SystemExit(f"{name}: counters end in _total, and nothing else does")
    of_openmetrics = [re.sub(r"^# (TYPE|HELP) (\S+)_total ", r"# \1 \2 ", line) for line in lines]
    return read("\n".join(of_openmetrics) + "\n# EOF\n")


def values(families: dict[str, Family]) -> dict:
    """{(name, labels): value} of all families."""
    return {key: value for family in families.values() for key, value in family.samples.items()}


def compare(families: dict[str, Family], dump: dict) -> None:
    """Compares every counter of every space, and the held blocks, with kvctl dump."""
    found = values(families)
    held, n = None, 0
    for counter in dump["counters"]:
        labels = (("domain", counter["domain"]), ("space", counter["space"]))
        names = [name for name in (f"kvd_space_{counter['name']}{end}" for end in
                                   ("_total", f"_{counter['unit']}_total", "", f"_{counter['unit']}"))
                 if (name, labels) in found]
        assert len(names) == 1 and found[names[0], labels] == counter["value"], (counter, names)
        n += 1
    assert n > 40, n
    for space in dump["spaces"]:
        labels = [("domain", space["domain"]), ("space", space["name"])]
        for state in ("free", "filling", "held", "evictable", "limbo"):
            key = ("kvd_space_blocks", tuple(sorted([*labels, ("state", state)])))
            assert found[key] == space["blocks"][state], (key, found[key], space["blocks"])
        lookups = found["kvd_space_lookup_seconds_count", tuple(labels)]
        seals = found["kvd_space_seal_seconds_count", tuple(labels)]
        assert lookups <= 1 and seals == 2, (lookups, seals)     # the filler: 3 lookups, 2 seals
        assert found["kvd_space_seal_seconds_sum", tuple(labels)] > 0
        assert found["kvd_space_allocate_seconds_count", tuple(labels)] >= 1
    held = dump["daemon"]["held_bytes"]
    assert found["kvd_pool_held_bytes", ()] == held and found["kvd_up", ()] == 1, held
    assert found["kvd_degraded", (("state", "full"),)] == 0


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        everything = read_plain(file.read())
    if len(sys.argv) > 2:
        with open(sys.argv[2], encoding="utf-8") as file:
            compare(everything, json.load(file))
