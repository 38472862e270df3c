#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The dashboard loads, the alerts are rules, and both name only metrics and labels that kvctl metrics exposes.

    boards.py ROOT TEXT         TEXT: output of kvctl metrics for a daemon that has a space
    boards.py --self-test       is a wrong name found?
"""
import json
import re
import sys
from pathlib import Path

import openmetrics

ENDS = {"counter": ["_total"], "info": ["_info"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}
TARGET_LABELS = {"instance", "job"}         # what Prometheus adds
# Families that have samples only if there is a tier.
LABELS_OF = {"kvd_tier_": {"tier"}}
SELECTOR = re.compile(r"\b(kvd_\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"\bby \(([^)]*)\)")


def exposed(families):
    """{name of a sample: its labels}"""
    names = {}
    for family in families.values():
        labels = {name for (_, pairs) in family.samples for name, _ in pairs}
        for start, always in LABELS_OF.items():
            if family.name.startswith(start):
                labels |= always
        for end in ENDS[family.type]:
            names[family.name + end] = labels | TARGET_LABELS
    return names


def wrong_in(expression, names):
    """Names in an expression that kvctl does not expose."""
    found, every = [], set()
    for name, selector in SELECTOR.findall(expression):
        if name not in names:
            found.append(name)
            continue
        every |= names[name]
        found += [f"{name}{{{label}}}" for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)
                  if label not in names[name]]
    return found + [f"by ({label})" for group in BY.findall(expression) for label in re.findall(r"\w+", group)
                    if label not in every]


def expressions_of_board(board):
    """Expressions of panels and variables. Ends the program if Grafana would not show one as intended."""
    panels, taken, ids = board["panels"], {}, set()
    assert board["uid"] and board["title"] and board["schemaVersion"] >= 36 and len(panels) > 10
    variables = {v["name"]: v for v in board["templating"]["list"]}
    for panel in panels:
        grid = panel["gridPos"]
        assert panel["id"] not in ids and panel["description"] and panel["targets"], panel["title"]
        ids.add(panel["id"])
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        for cell in ((x, y) for x in range(grid["x"], grid["x"] + grid["w"])
                     for y in range(grid["y"], grid["y"] + grid["h"])):
            assert cell not in taken, (panel["title"], taken[cell])
            taken[cell] = panel["title"]
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables.keys(), (panel["title"], used)
            yield panel["title"], target["expr"]
    for v in variables.values():
        if v["type"] == "query":
            yield v["name"], v["query"]["query"].removeprefix("label_values(").removesuffix(")")


def expressions_of_rules(text):
    """(name, expression) of each rule, from the simple YAML of the rules."""
    for rule in re.split(r"^      - alert: ", text, flags=re.M)[1:]:
        expression = re.search(r"^        expr: (?:>-\n((?:          .*\n)+)|(.*)\n)", rule, re.M)
        assert expression and "summary: " in rule and "severity: " in rule, rule
        yield rule.split("\n")[0], expression[1] or expression[2]


def self_test():
    names = {"kvd_up": {"instance"}, "kvd_x_total": {"space"}}
    assert wrong_in('sum by (space) (kvd_x_total{space="a"}) / kvd_up', names) == []
    assert wrong_in("kvd_y + kvd_up", names) == ["kvd_y"]
    assert wrong_in('kvd_up{space=~"x"}', names) == ["kvd_up{space}"]
    assert wrong_in("sum by (tier) (kvd_up)", names) == ["by (tier)"]


def main(root, text):
    names = exposed(openmetrics.read_plain(Path(text).read_text(encoding="utf-8")))
    tools = Path(root) / "tools/monitoring"
    board = json.loads((tools / "grafana.json").read_text(encoding="utf-8"))
    rules = list(expressions_of_rules((tools / "alerts.yaml").read_text(encoding="utf-8")))
    assert len(rules) >= 8, rules
    wrong = [f"{where}: {what}" for where, expression in [*expressions_of_board(board), *rules]
             for what in wrong_in(expression, names)]
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)


if sys.argv[1:] == ["--self-test"]:
    self_test()
else:
    self_test()
    main(*sys.argv[1:])
