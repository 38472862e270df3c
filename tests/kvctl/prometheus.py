#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes kvctl metrics with the lines of kvctl(1), also those for the OpenTelemetry collector, whose receiver
is Prometheus's own code, and evaluates the alerts.

    prometheus.py ROOT KVCTL FOLDER     KVD_SOCKET names the daemon
"""
import atexit
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import yaml

ROOT, KVCTL, FOLDER = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
PATIENCE = 600
EXAMPLE = re.compile(r"\.Bd -literal -offset indent\n((?:receivers|scrape_configs):\n.*?)\.Ed", re.S)


def examples():
    """The scrape_configs of kvctl(1): for Prometheus, and in a receiver of the collector."""
    found = [yaml.safe_load(it) for it in EXAMPLE.findall((ROOT / "tools/man/kvctl.1").read_text())]
    assert len(found) == 2, found
    return [it["scrape_configs"] if "scrape_configs" in it else it["receivers"]["prometheus"]["config"]["scrape_configs"]
            for it in found]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def exporter():
    server = subprocess.Popen([KVCTL, "metrics", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return re.search(r"127\.0\.0\.1:\d+", server.stdout.readline())[0]


def start(jobs):
    """A Prometheus with these jobs. Returns its address."""
    config, address = FOLDER / "prometheus.yml", f"127.0.0.1:{free_port()}"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                                      "rule_files": [str(ROOT / "tools/monitoring/alerts.yaml")], "scrape_configs": jobs}))
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
    with (FOLDER / "prometheus.log").open("w") as log:
        server = subprocess.Popen(["prometheus", f"--config.file={config}", f"--storage.tsdb.path={FOLDER}/tsdb",
                                   f"--web.listen-address={address}"], stderr=log, stdout=log)
    atexit.register(server.wait)
    atexit.register(server.kill)
    return address


def ask(address, what):
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/{what}", timeout=PATIENCE) as answer:
            return json.load(answer)["data"]
    except OSError:
        return None         # not ready yet


def until(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what}: {(FOLDER / 'prometheus.log').read_text()[-2000:]}"
        time.sleep(0.2)


def up_jobs(address):
    data = ask(address, "query?query=kvd_up") or {"result": []}
    return {it["metric"]["job"] for it in data["result"] if it["value"][1] == "1"}


def evaluated(address):
    """Every rule was evaluated without an error."""
    data = ask(address, "rules")
    rules = [rule for group in data["groups"] for rule in group["rules"]] if data else []
    return rules and all(rule["health"] == "ok" for rule in rules)


where, jobs = exporter(), []
for number, rows in enumerate(examples()):
    for row in rows:
        assert row["static_configs"][0]["targets"] == ["127.0.0.1:9464"], row
        jobs.append({**row, "job_name": f"{row['job_name']}{number}", "static_configs": [{"targets": [where]}]})
prometheus = start(jobs)
until(lambda: up_jobs(prometheus) == {job["job_name"] for job in jobs}, "the daemon is up in each job")
until(lambda: evaluated(prometheus), "the alerts are evaluated")
