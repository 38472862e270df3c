# SPDX-License-Identifier: Apache-2.0
"""evidence.json as one HTML page: first every verdict in one table, then each method with its tables and plots.

It can be read on a phone (verdicts and plots are below each other, wide tables scroll), on a wide screen (plots are
side by side) and in print.
"""

from __future__ import annotations

from collections import Counter
from html import escape

from findings import FAILS, HOLDS, Findings, Table
from svg import draw, split

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #1f2933 }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5em; border-bottom: 1px solid #cbd5e1; padding-bottom: .2em }
table { border-collapse: collapse; font-size: 14px } .scroll { overflow-x: auto; margin: 1em 0 }
th, td { border: 1px solid #cbd5e1; padding: 3px 9px; text-align: right } th { background: #f1f5f9 }
td:first-child, th:first-child { text-align: left }
.verdicts th, .verdicts td { text-align: left; vertical-align: top }
@media screen and (max-width: 700px) { .verdicts, .verdicts tbody, .verdicts tr, .verdicts td { display: block }
  .verdicts th { display: none } .verdicts td { border: 0; padding: 2px 0; overflow-wrap: anywhere }
  .verdicts td::before { content: attr(data-is) ": "; font-weight: 600 } .verdicts tr { border-top: 1px solid #cbd5e1; padding: 8px 0 } }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: 12px; align-items: end }
svg { background: #fff; border: 1px solid #e2e8f0; width: 100%; height: auto; box-sizing: border-box }
svg text { font: 11px system-ui, sans-serif; fill: #334155 }
figure { margin: 0 } figcaption { font-weight: 600; font-size: 13px; margin-bottom: 3px }
.note { font-size: 13px; color: #475569; max-width: 900px } .grid { stroke: #e2e8f0 }
.holds { color: #15803d } .fails { color: #b91c1c } .open { color: #92400e }
nav a { margin-right: 1.2em; white-space: nowrap }
@media print { nav { display: none } body { margin: 0; max-width: none; font-size: 11px } table { font-size: 10px }
  .scroll { overflow: visible } figure, tr { break-inside: avoid } h2, h3 { break-after: avoid } }
"""


VERDICT = ("Method", "The paper says", "Here", "At our scale")      # columns; on a phone, the beginning of each line


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return escape("-" if value is None else str(value))


def scrolled(table: str) -> str:
    return f"<div class='scroll'>{table}</div>"


def table(t: Table) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in t.columns)
    rows = "".join("<tr>" + "".join(f"<td>{cell(v)}</td>" for v in row) + "</tr>" for row in t.rows)
    note = f"<p class='note'>{escape(t.note)}</p>" if t.note else ""
    return f"<h3>{escape(t.title)}</h3>{scrolled(f'<table><tr>{head}</tr>{rows}</table>')}{note}"


def colour(verdict: str) -> str:
    if verdict in (HOLDS, "reached", "stated"):
        return "holds"
    return "fails" if verdict in (FAILS, "missed") else "open"


def verdict(f: Findings, said: str, measured: str, verdict: str, why: str) -> str:
    said_so = f"<b>{verdict}</b>{': ' + escape(why) if why else ''}"
    cells = (f"<a href='#{f.method}'>{escape(f.title)}</a>", said, escape(measured), f"<span class='{colour(verdict)}'>{said_so}</span>")
    return "<tr>" + "".join(f"<td data-is='{escape(what)}'>{text}</td>" for what, text in zip(VERDICT, cells)) + "</tr>"


def verdicts(findings: list[Findings]) -> str:
    """The table of all verdicts with their measured numbers, the papers' claims first."""
    claims = [verdict(f, escape(c.paper), c.measured, c.verdict, c.why) for f in findings for c in f.claims]
    aims = [verdict(f, f"<i>kvd's aim:</i> {escape(a.text)}", a.measured, a.verdict, a.why)
            for f in findings for a in f.aims]
    head = "".join(f"<th>{what}</th>" for what in VERDICT)
    counts = Counter(c.verdict for f in findings for c in f.claims)
    return (f"<p>Claims: {len(claims)}; {', '.join(f'{word}: {n}' for word, n in counts.most_common())}.</p>"
            + scrolled(f"<table class='verdicts'><tr>{head}</tr>{''.join(claims + aims)}</table>"))


def section(f: Findings) -> str:
    plots = "".join(draw(part) for p in f.plots for part in split(p))
    return (f"<h2 id='{f.method}'>{escape(f.title)}</h2><p>{escape(f.summary)}</p>"
            f"<p><b>When to use it.</b> {escape(f.use)}</p>"
            f"<div class='plots'>{plots}</div>{''.join(table(t) for t in f.tables)}")


def models(about: dict) -> str:
    """Which models have measured."""
    if "model" in about:
        return f"<code>--model {escape(str(about['model']))}</code>, a pretrained model in transformers"
    return "with the small models of the repository (1.5 and 1.9 million parameters, trained on synthetic text), in kvlm"


def limits(about: dict) -> str:
    """What the page cannot show."""
    if "model" in about:
        return ("Rows not called kvd are independent programs on the same weights. A claim about one model is none about "
                "a larger one.")
    return ("The methods are compared with the full cache, and with other settings of the same method. Small models show "
            "whether the machinery works, and what a method does to a look-up. They do not show what a large model loses "
            "on your data, nor whether another method is better: <code>sh tools/evidence --model smollm2</code> compares "
            "with published methods (kvpress), int8 and int4, on a pretrained model.")


def page(findings: list[Findings], about: dict) -> str:
    """The document. `about`: the programs and the machine of the run."""
    links = "".join(f"<a href='#{f.method}'>{escape(f.title)}</a>" for f in findings)
    facts = "".join(f"<tr><td>{escape(str(k))}</td><td style='text-align:left'>{escape(str(v))}</td></tr>"
                    for k, v in about.items())
    return ("<!doctype html><html lang='en'><meta charset='utf-8'><title>kvd: evidence</title>"
            "<meta name='viewport' content='width=device-width, initial-scale=1'>"
            f"<style>{STYLE}</style><h1>kvd: the five methods, measured</h1>"
            f"<p>Every number on this page was measured by <code>sh tools/evidence</code> {models(about)}, on the machine "
            "that the last table names. The methods run as they ship, in a daemon, switched on by the settings of a space, "
            f"through the public calls. {limits(about)}</p>"
            "<p>A recall has an interval of 95 % (Wilson); differences are on the same questions, with "
            "Newcombe's paired interval and McNemar's exact test; times are medians of seven rounds in which the "
            "contenders take turns, with the least and the greatest. A claim <i>holds</i> only if direction and size are "
            "outside of these.</p>"
            f"{verdicts(findings)}<nav>{links}</nav>{''.join(section(f) for f in findings)}"
            f"<h2>Where it was measured</h2>{scrolled(f'<table>{facts}</table>')}</html>\n")
