# SPDX-License-Identifier: Apache-2.0
"""kvlm with each type of keys and values: processes of one type share its blocks, and those of another type do not.

    KVD=build/daemon/kvd KVCTL=build/tools/kvctl/kvctl KVLM=build/tools/kvlm/kvlm python3 tests/kvlm/test_kv_types.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL, DEMO = ROOT / "tools/kvlm/model", ROOT / "tools/kvlm/demo"
sys.path[:0] = [str(ROOT / "tests/lib")]

from instance import PATIENCE, Instance     # noqa: E402  (needs the path above)

# Bytes of a token: 8 layers, keys and values of 2 heads, of 32 numbers each; 4 more of each head if they are quantised.
TOKEN_BYTES = {"f32": 4096, "f16": 2048, "bf16": 2048, "int8": 1152, "int4": 640, "fp8": 1024,
               "fp8_e5m2": 1024}
DOCUMENT, LINES = DEMO / "document-1.txt", DEMO.joinpath("questions-1.jsonl").read_text().splitlines()[:6]
ANSWERS = [json.loads(line)["answer"] for line in LINES]


class Types(unittest.TestCase):
    def setUp(self) -> None:
        self.daemon = Instance("--backend", "host", "--pool", "64M")

    def tearDown(self) -> None:
        with self.daemon:
            self.daemon.check()

    def start(self, kv_type: str, *options: str) -> subprocess.Popen:
        """Starts a kvlm that answers the questions it reads."""
        return subprocess.Popen([os.environ["KVLM"], "--model", str(MODEL), "--socket", self.daemon.socket, "--kv-type", kv_type,
                                 "--document", str(DOCUMENT), "--prompts", "-", "--json", *options],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self, kvlm: subprocess.Popen, lines: list[str] = LINES) -> tuple[list[dict], str]:
        """Gives it its questions. Returns the reports, and what it complained about."""
        out, complaints = kvlm.communicate("\n".join(lines) + "\n", PATIENCE)
        self.assertEqual(kvlm.returncode, 0, complaints)
        return [json.loads(line) for line in out.splitlines()], complaints

    def ask(self, kv_type: str, *options: str) -> list[dict]:
        reports, complaints = self.end(self.start(kv_type, *options))
        self.assertEqual(complaints, "")
        return reports

    def expect_shared(self, kv_type: str, reports: list[dict]) -> None:
        """Everything but the question was found, and each byte of it equals one computed again; the answers are right."""
        self.assertEqual([report["text"] for report in reports], ANSWERS)
        self.assertEqual(sum(report["wrong_bytes"] for report in reports), 0)
        for report in reports:
            self.assertGreaterEqual(report["reused_tokens"], report["prompt_tokens"] - 32)
            self.assertEqual(report["verified_bytes"], report["reused_tokens"] * TOKEN_BYTES[kv_type])

    def test_each_type_has_its_own_space_and_the_answers_of_f32(self) -> None:
        for kv_type in TOKEN_BYTES:
            first = self.ask(kv_type)
            self.assertEqual(first[0]["reused_tokens"], 0)      # what the types before left is not found
            self.assertEqual([report["text"] for report in first], ANSWERS)
            self.expect_shared(kv_type, self.ask(kv_type, "--verify"))
        spaces = {space["name"]: space["block_bytes"] for space in self.daemon.stat("spaces")["spaces"]}
        self.assertEqual(spaces, {"model" if kv_type == "f32" else f"model-{kv_type}": 16 * size
                                  for kv_type, size in TOKEN_BYTES.items()})

    def test_a_space_of_another_type_is_not_used(self) -> None:
        self.ask("int8", "--space", "mine")
        reports, complaints = self.end(self.start("int4", "--space", "mine"))
        self.assertIn("dtype", complaints)
        self.assertEqual(sum(report["reused_tokens"] for report in reports), 0)
        self.assertEqual([report["text"] for report in reports], ANSWERS)

    def test_a_killed_process_takes_nothing_with_it(self) -> None:
        for kv_type in ("int8", "int4", "fp8"):
            victim, other = self.start(kv_type), self.start(kv_type)
            victim.stdin.write(LINES[0] + "\n")
            victim.stdin.flush()
            self.assertEqual(json.loads(victim.stdout.readline())["text"], ANSWERS[0])
            victim.stdin.write("\n".join(LINES[1:]) + "\n")     # it works on these when it dies
            victim.stdin.flush()
            victim.kill()
            victim.communicate()
            self.end(other)
            self.daemon.check()
            self.expect_shared(kv_type, self.ask(kv_type, "--verify"))

    def test_what_cannot_be_quantised_says_so(self) -> None:
        for model, options, words in ((MODEL, ("--kv-type", "q8"), "f32 f16 bf16 int8 int4 fp8 fp8_e5m2"),
                                      (MODEL.parent / "diffusion", ("--kv-type", "int4"), "hidden states")):
            done = subprocess.run([os.environ["KVLM"], "--model", str(model), "--no-share", "--text", str(DOCUMENT), *options],
                                  capture_output=True, text=True, timeout=PATIENCE)
            self.assertIn(words, done.stderr)
            self.assertEqual((done.returncode > 0, done.stdout, done.stderr.count("\n")), (True, "", 1))


if __name__ == "__main__":
    if not all(os.environ.get(name) for name in ("KVD", "KVCTL", "KVLM")):
        print("skipped: KVD, KVCTL and KVLM are not set")
        sys.exit(77)
    unittest.main()
