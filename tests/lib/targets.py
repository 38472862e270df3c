#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ninja has to make so that the tests of some suites can run, and no more.

    meson introspect BUILD --tests --targets -f | targets.py BUILD [--suite NAME | --no-suite NAME]...

Options of other kinds are ignored, as meson's own are given. Without a --suite the answer is "all".
"""
import json
import os
import sys


def targets(build, options, known):
    chosen = {value for option, value in zip(options, options[1:]) if option == "--suite"}
    if not chosen:
        return ["all"]
    files = {target["id"]: target["filename"] for target in known["targets"]}
    tests = [test for test in known["tests"] if chosen & {suite.split(":")[-1] for suite in test["suite"]}]
    return sorted({os.path.relpath(file, os.path.realpath(build))
                   for test in tests for target in test["depends"] for file in files[target]})


print(*targets(sys.argv[1], sys.argv[2:], json.load(sys.stdin)))
