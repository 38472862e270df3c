# SPDX-License-Identifier: Apache-2.0
"""Measures the five methods with the models of the repository, and writes evidence.json, evidence.html and evidence.svg.

    sh tools/evidence [--quick] [--only METHOD[,METHOD...]] [--out DIR]

METHOD is keydiff, kvreviver, hshare, memshare, bicache or together. --quick asks fewer questions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import bicache
import hshare
import keydiff
import kvreviver
import memshare
import together
from engine import Failed, Programs, commit, processor
from findings import HOLDS, NOT_TRIED, Findings
from page import page
from progress import Progress
from svg import beside

PARTS = {"keydiff": keydiff, "kvreviver": kvreviver, "hshare": hshare, "memshare": memshare, "bicache": bicache,
         "together": together}


def measure(programs: Programs, names: list[str], quick: bool) -> list[Findings]:
    """Runs the parts. Each knows its number of steps beforehand."""
    progress = Progress(sum(PARTS[name].steps(quick) for name in names))
    findings = []
    for name in names:
        started = time.monotonic()
        found = PARTS[name].run(programs, progress, quick)
        found.summary += f" ({time.monotonic() - started:.0f} s)"
        findings.append(found)
    progress.end()
    return findings


def summary(findings: list[Findings]) -> None:
    """Prints claims and aims on standard output."""
    for f in findings:
        print(f"\n{f.title}")
        for claim in f.claims:
            print(f"  {claim.verdict:14} "
                  + (f"{claim.paper}: {claim.why}" if claim.verdict == NOT_TRIED else claim.measured))
        for aim in f.aims:
            print(f"  {aim.verdict:14} aim: {aim.text}: {aim.measured}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"--only takes {', '.join(PARTS)}, not {unknown[0]}")
    started = time.time()
    findings = measure(Programs(options.build), names, options.quick)
    about = {"commit": commit(), "processor": processor(), "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
             "minutes": round((time.time() - started) / 60, 1), "quick": options.quick}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "evidence.json").write_text(
        json.dumps({"about": about, "methods": {f.method: f.as_json() for f in findings}}, indent=1) + "\n")
    (options.out / "evidence.html").write_text(page(findings, about))
    (options.out / "evidence.svg").write_text(beside([(f.title, p) for f in findings for p in f.plots[:1]]))
    summary(findings)
    broken = [c for f in findings for c in f.claims if c.invariant and c.verdict != HOLDS]
    print(f"\n{options.out / 'evidence.json'} has the numbers, evidence.html tables and plots, evidence.svg a picture.")
    return 1 if broken else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failure:
        sys.exit(f"evidence: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
