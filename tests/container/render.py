# SPDX-License-Identifier: Apache-2.0
"""Renders the templates of a chart, as far as kvd's own use Helm's language.

Known are if, else, else if, range, define, include and variables of range; pipelines without parentheses; and the functions
below. Anything else is an error. Where there is a helm, chart.py compares the objects with its own.
"""
from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Callable

import yaml

ACTION = re.compile(r"\{\{(-?)\s*(/\*.*?\*/|.*?)\s*(-?)\}\}", re.S)
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')


def plain(value: Any) -> str:
    return "true" if value is True else "false" if value is False else "" if value is None else str(value)


def to_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=False).removesuffix("\n").removesuffix("\n...")


def nindent(spaces: int, text: str) -> str:
    return "\n" + "\n".join(" " * spaces + line for line in text.split("\n"))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "toYaml": to_yaml, "nindent": nindent, "quote": lambda value: f'"{plain(value)}"', "int": int,
    "default": lambda other, value: value or other, "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
}


def pieces(text: str) -> list[tuple[str, str]]:
    """("text", ...) and ("action", ...), with the white space cut off where an action says so."""
    found, at, cut = [], 0, False
    for match in [*ACTION.finditer(text), None]:
        between = text[at:match.start() if match else None]
        between = between.lstrip() if cut else between
        found.append(("text", between.rstrip() if match and match[1] else between))
        if match:
            at, cut = match.end(), bool(match[3])
            found += [] if match[2].startswith("/*") else [("action", match[2])]
    return found


class Chart:
    def __init__(self, folder: Path, values: dict, release: str = "kvd") -> None:
        about = yaml.safe_load((folder / "Chart.yaml").read_text())
        self.top = {"Values": values, "Release": {"Name": release, "Namespace": "default", "Service": "Helm"},
                    "Chart": {"Name": about["name"], "Version": about["version"], "AppVersion": about["appVersion"]}}
        self.defined: dict[str, list] = {}
        self.tree(pieces((folder / "templates/_helpers.tpl").read_text()))
        self.folder = folder

    def render(self, name: str) -> str:
        tree = self.tree(pieces((self.folder / "templates" / name).read_text()))
        return self.run(tree, self.top, {})

    # ---- from text to a tree: (kind, argument, [branch, ...])

    def tree(self, rest: list[tuple[str, str]]) -> list:
        rest = rest[:]
        tree, end = self.body(rest)
        assert not end and not rest, f"too many ends: {end}"
        return tree

    def body(self, rest: list) -> tuple[list, str]:
        """Up to the end, or to an else, which is returned."""
        nodes: list = []
        while rest:
            kind, text = rest.pop(0)
            word = text.split(" ")[0] if kind == "action" else ""
            if word in ("end", "else"):
                return nodes, text
            if word in ("if", "range"):
                nodes.append((word, text[len(word) + 1:], self.branches(rest)))
            elif word == "define":
                name = text.split('"')[1]
                self.defined[name], end = self.body(rest)
                assert end == "end", text
            else:
                nodes.append((kind, text, []))
        return nodes, ""

    def branches(self, rest: list) -> list:
        """[(condition, nodes), ...] with the first condition left out."""
        found, condition = [], ""
        while True:
            nodes, end = self.body(rest)
            found.append((condition, nodes))
            if end == "end":
                return found
            assert end.startswith("else"), end
            condition = end[len("else if "):] if end.startswith("else if ") else "else"

    # ---- from a tree to text

    def run(self, nodes: list, dot: Any, variables: dict) -> str:
        out = ""
        for kind, text, branches in nodes:
            if kind == "text":
                out += text
            elif kind == "action":
                out += plain(self.value(text, dot, variables))
            elif kind == "if":
                out += self.choose(text, branches, dot, variables)
            else:
                out += self.each(text, branches, dot, variables)
        return out

    def choose(self, first: str, branches: list, dot: Any, variables: dict) -> str:
        for condition, nodes in branches:
            if condition == "else" or self.value(condition or first, dot, variables):
                return self.run(nodes, dot, variables)
        return ""

    def each(self, text: str, branches: list, dot: Any, variables: dict) -> str:
        names, _, what = text.rpartition(":=")
        items = self.value(what.strip(), dot, variables)
        pairs = sorted(items.items()) if isinstance(items, dict) else list(enumerate(items))
        out = ""
        for key, value in pairs:
            inner = dict(zip((name.strip() for name in names.split(",")), (key, value)), **variables) if names else variables
            out += self.run(branches[0][1], value, inner)
        return out

    def value(self, pipeline: str, dot: Any, variables: dict) -> Any:
        arguments: list = []
        for call in pipeline.split(" | "):
            words = WORD.findall(call)
            if words[0] == "include":
                name, context = (self.term(word, dot, variables) for word in words[1:])
                result = self.run(self.defined[name], context, {})
            elif words[0] in FUNCTIONS:
                result = FUNCTIONS[words[0]](*(self.term(word, dot, variables) for word in words[1:]), *arguments)
            else:
                assert len(words) == 1 and not arguments, f"unknown to render.py: {pipeline}"
                result = self.term(words[0], dot, variables)
            arguments = [result]
        return arguments[0]

    def term(self, word: str, dot: Any, variables: dict) -> Any:
        if word[0] == '"':
            return word[1:-1]
        if word.isdigit():
            return int(word)
        name, _, path = word.partition(".")
        assert name in ("", "$", *variables), f"unknown to render.py: {word}"
        value = dot if name == "" else self.top if name == "$" else variables[name]
        for member in filter(None, path.split(".")):
            value = value[member]
        return value


def merged(values: dict, others: dict) -> dict:
    """Values with others put over them, as Helm does."""
    result = dict(values)
    for key, other in others.items():
        both = isinstance(other, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], other) if both else other
    return result


def objects(folder: Path, others: dict) -> list[dict]:
    """All objects of the chart with these values."""
    values = merged(yaml.safe_load((folder / "values.yaml").read_text()), others)
    chart = Chart(folder, values)
    texts = [chart.render(file.name) for file in sorted((folder / "templates").glob("*.yaml"))]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]
