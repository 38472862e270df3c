# SPDX-License-Identifier: Apache-2.0
"""The page of evidence in a real browser, as wide as a phone and as a screen: nothing overflows, plots are below each
other or side by side, letters stay readable, and each verdict is there once. The findings are made up, and long.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape, unescape
from pathlib import Path

from findings import FAILS, HOLDS, Aim, Claim, Findings, Plot, Table
from page import page
from svg import MOST, beside, draw, split

PHONE, SCREEN = 390, 1280
LEAST_LETTER = 9        # CSS pixels
PLOTS, LINES = 3, 6

MEASURE = """
const out = {};
for (const frame of document.querySelectorAll('iframe')) {
  const doc = frame.contentDocument, root = doc.documentElement, plots = [...doc.querySelectorAll('svg')];
  out[frame.id] = {
    width: root.clientWidth, needs: root.scrollWidth,
    plots: plots.map(p => { const r = p.getBoundingClientRect(); return [r.left, r.top, r.right, r.width]; }),
    letters: Math.min(...plots.map(p => 11 * p.getBoundingClientRect().width / p.viewBox.baseVal.width)),
    outside: plots.flatMap(p => [...p.querySelectorAll('text')].filter(t => {
      const a = t.getBoundingClientRect(), b = p.getBoundingClientRect();
      return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1; })
      .map(t => t.textContent)),
    verdicts: doc.querySelectorAll('.verdicts tr').length,
    hidden: [...doc.querySelectorAll('.verdicts td')].filter(t => {
      const a = t.getBoundingClientRect(); return a.left < 0 || a.right > root.clientWidth; }).map(t => t.textContent),
  };
}
document.body.innerHTML = '<pre id="out">' + JSON.stringify(out) + '</pre>';
"""


def made_up(method: str) -> Findings:
    lines = {f"a policy with quite a long name, at a budget of 1/{i + 2}": [(x / 8, x / 8 / (i + 1), 0.0, 1.0)
                                                                            for x in range(9)] for i in range(LINES)}
    return Findings(
        method, f"The method {method}", "What it does, and what was asked of it. " * 8, "Where prompts are long. " * 5,
        claims=[Claim("At an eighth of the budget as right as with all of it (Table 1) & 8.6 times as fast",
                      "+0.02 (-0.11 to +0.15, p = 0.84, n = 80)", verdict, "a reason that takes its room, too")
                for verdict in (HOLDS, FAILS)],
        aims=[Aim("within 3 % of dense", "0.97 (0.91 to 0.99), n = 80", "reached")],
        tables=[Table("All of it", [f"column {i}" for i in range(14)], [[i * 1.234567 for i in range(14)]] * 5, "A note.")],
        plots=[Plot(f"Recall by budget, part {i} of a title", "blocks that are kept", "recall", lines)
               for i in range(PLOTS)])


def look_of(picture: str) -> dict[str, tuple[str, float]]:
    """Colour and width of each line of a plot, by the line's name."""
    return {name: (stroke, float(width)) for stroke, width, name in re.findall(
        r'<line x1="[^"]*" x2="[^"]*" y1="[^"]*" y2="[^"]*" stroke="([^"]*)" stroke-width="([^"]*)"/>'
        r'<text[^>]*>([^<]*)</text>', picture)}


def test_many_lines() -> None:
    """Each picture has few lines, on the same axes, in different colours; kvd's are in all of them, and thicker."""
    ours = {"kvd, one=on": [(0, 0.5), (1, 1)], "kvd, one.profile=paper": [(0, 0.4), (1, 0.9)]}
    for n in (0, 1, 5, 6, 10, 23):
        others = {f"policy {i}": [(0, i / 30), (2 if i == 7 else 1, 1)] for i in range(n)}
        for series in (ours | others, others | ours, others):
            plots = split(Plot("Recall", "x", "y", series))
            drawn = [look_of(draw(plot)) for plot in plots]
            assert all(len(looks) == len(plot.series) <= MOST for looks, plot in zip(drawn, plots)), drawn
            assert {name for looks in drawn for name in looks} == set(series)
            assert len({(plot.x_range, plot.y_range) for plot in plots}) == 1
            for looks in drawn:
                assert len({colour for colour, _ in looks.values()}) == len(looks), f"a colour is used twice: {looks}"
                heavy = [width for name, (_, width) in looks.items() if name in ours]
                assert len(heavy) == (2 if ours.keys() <= series.keys() else 0)
                assert all(width * 2 < wide for wide in heavy for name, (_, width) in looks.items() if name not in ours)
    assert beside([("one", Plot("Recall", "x", "y", ours | others)), ("two", Plot("Recall", "x", "y", ours))]).count("<svg") > 5


def test_limits_are_stated() -> None:
    """The small models' page refers to --model for comparisons, and the pretrained model's has them."""
    small, pretrained = page([], {"commit": "0"}), page([], {"commit": "0", "model": "a folder"})
    refers, has = "compares with published methods", "independent programs on the same weights"
    assert refers in small and has not in small
    assert refers not in pretrained and has in pretrained


def rendered(browser: str, html: str, folder: str) -> dict:
    """The browser's measurements of the page in frames of both widths."""
    frames = "".join(f"<iframe id='w{width}' width={width} height=800 style='border:0' srcdoc='{escape(html, quote=True)}'>"
                     "</iframe>" for width in (PHONE, SCREEN))
    path = Path(folder) / "frames.html"
    path.write_text(f"<!doctype html><meta charset='utf-8'><body>{frames}"
                    f"<script>addEventListener('load', () => {{{MEASURE}}})</script></body>")
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                           f"--user-data-dir={folder}/profile", "--window-size=1700,1000", "--virtual-time-budget=20000",
                           "--dump-dom", path.as_uri()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=600, env={**os.environ, "HOME": folder})
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)
    assert found, f"the browser says nothing:\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
    return json.loads(unescape(found.group(1)))


def main() -> int:
    test_many_lines()
    test_limits_are_stated()
    browser = shutil.which("chromium")
    if not browser:
        print("skipped: no chromium")
        return 77
    methods = [made_up("one"), made_up("two")]
    with tempfile.TemporaryDirectory(prefix="kvd-page-", ignore_cleanup_errors=True) as folder:
        seen = rendered(browser, page(methods, {"commit": "0", "processor": "a processor"}), folder)
    for name, width in (("w390", PHONE), ("w1280", SCREEN)):
        it = seen[name]
        print(name, {key: value for key, value in it.items() if key != "plots"})
        assert it["needs"] <= it["width"] <= width, f"{name}: sticks out: {it['needs']} of {it['width']}"
        assert it["letters"] >= LEAST_LETTER, f"{name}: letters of {it['letters']} pixels"
        assert not it["outside"], f"{name}: outside of their plots: {it['outside']}"
        assert not it["hidden"], f"{name}: verdicts outside of the screen: {it['hidden']}"
        assert it["verdicts"] == 1 + 3 * len(methods), f"{name}: {it['verdicts']} rows"
        assert len(it["plots"]) == PLOTS * len(methods)
    phone, screen = seen["w390"]["plots"], seen["w1280"]["plots"]
    assert len({left for left, *_ in phone}) == 1, f"a phone has plots beside each other: {phone}"
    assert [abs(screen[i][1] - screen[0][1]) < 1 and screen[i][0] >= screen[i - 1][2] for i in range(1, PLOTS)] == [True] * 2, \
        f"a screen has plots below each other: {screen}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
