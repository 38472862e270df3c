# SPDX-License-Identifier: Apache-2.0
"""kvlm with the committed model and methods enabled in its space: answers are found, and the pool is consistent, whatever
the type of keys and values.

    KVD=build/daemon/kvd KVCTL=build/tools/kvctl/kvctl KVLM=build/tools/kvlm/kvlm python3 tests/kvlm/test_methods.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tools/kvlm/model"
sys.path[:0] = [str(ROOT / "tools/kvlm"), str(ROOT / "tests/lib")]

from instance import Instance                         # noqa: E402  (needs the path above)
from language import TOKENS, Writer, recall_case      # noqa: E402

QUESTIONS, LENGTH, TAIL = 8, 600, 24
WRITER = Writer("kvlm-methods", held_out=True)
CASES = [recall_case(WRITER, LENGTH, terse=False) for _ in range(QUESTIONS)]


class Methods(unittest.TestCase):
    kv_type, space = "f32", "model"

    def setUp(self) -> None:
        self.daemon = Instance("--backend", "host", "--pool", "64M")
        self.socket = self.daemon.socket
        self.prompts = Path(self.daemon.folder, "prompts")
        self.prompts.write_text("".join(json.dumps({"prompt": TOKENS.decode(c.prompt)}) + "\n" for c in CASES))
        self.ask("--sequence", "off", "--max-tokens", "0")   # creates the space

    def tearDown(self) -> None:
        with self.daemon:
            self.daemon.check()

    def ask(self, *options: str) -> list[dict]:
        """Runs kvlm. On a busy machine the pool may take longer than kvlm's default --sync-wait, so this sets 10 s."""
        options = options if "--sync-wait" in options else (*options, "--sync-wait", "10000")
        done = subprocess.run([os.environ["KVLM"], "--model", str(MODEL), "--socket", self.socket, "--prompts",
                               str(self.prompts), "--json", "--max-tokens", "8", "--decode-tail", str(TAIL),
                               "--kv-type", self.kv_type, *options],
                              check=True, stdout=subprocess.PIPE)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def recall(self, settings: str, *options: str) -> tuple[float, list[dict]]:
        """The share of questions that are answered correctly, and the reports."""
        self.daemon.kvctl("space", "set", self.space, *settings.split())
        reports = self.ask(*options)
        right = [r["text"].split(".")[0] == TOKENS.decode(c.answer) for r, c in zip(reports, CASES)]
        return sum(right) / len(right), reports

    def sequences(self, reports: list[dict], name: str) -> list[int]:
        return [r["sequence"][name] for r in reports]

    def test_a_prompt_that_was_stored_before_is_read_where_it_is(self) -> None:
        """Used to fail: blocks that turned out to be already stored were read from kvlm's own copies after it freed them."""
        found, _ = self.recall("hshare=on hshare.top=102")
        self.assertGreaterEqual(found, 0.85)

    def test_a_quarter_of_the_tokens_is_enough(self) -> None:
        found, reports = self.recall("hshare=on hshare.sinks=16 hshare.recent=32 hshare.top=102", "--own-prompt", "yes")
        self.assertGreaterEqual(found, 0.75)
        for report in reports:   # 6 of 8 layers are sparse, and a quarter of those use another layer's selection
            self.assertGreater(report["selections"], TAIL * 4)
            self.assertLess(report["selections"], report["decoded_tokens"] * 6 * 2)

    def test_shared_selections_are_fewer(self) -> None:
        _, reports = self.recall("hshare=on hshare.top=102 hshare.layer_ratio=0.5 hshare.head_ratio=0.5")
        for report in reports:
            self.assertLessEqual(report["selections"], report["decoded_tokens"] * 3)

    def test_a_missing_block_comes_before_its_token(self) -> None:
        """Used to fail: a block was requested only at the 32nd token, and arrived after the answer."""
        found, reports = self.recall("kvreviver=on kvreviver.budget=0.1", "--own-prompt", "yes")
        self.assertGreaterEqual(found, 0.85)
        self.assertTrue(all(self.sequences(reports, "revived_exact")))
        self.assertEqual(sum(self.sequences(reports, "late")), 0)
        for resident, blocks in zip(self.sequences(reports, "most_resident"), self.sequences(reports, "blocks")):
            self.assertLessEqual(resident, blocks // 10 + 3)

    def test_missing_blocks_come_for_a_selection_too(self) -> None:
        found, reports = self.recall("kvreviver=on kvreviver.budget=0.1 hshare=on hshare.sinks=16 hshare.recent=32 "
                                     "hshare.top=102", "--own-prompt", "yes")
        self.assertGreaterEqual(found, 0.75)
        self.assertTrue(all(self.sequences(reports, "misses")))

    def test_what_does_not_come_in_time_is_left_out(self) -> None:
        _, reports = self.recall("kvreviver=on kvreviver.budget=0.1", "--own-prompt", "yes", "--sync-wait", "0")
        self.assertTrue(all(r["generated_tokens"] for r in reports))

    def test_evicted_tokens_free_blocks(self) -> None:
        found, reports = self.recall(f"keydiff=on keydiff.budget={LENGTH // 4}")
        self.assertGreaterEqual(found, 0.25)
        for sequence in (r["sequence"] for r in reports):
            self.assertGreater(sequence["dropped"], sequence["blocks"] // 2)
            self.assertLessEqual(sequence["resident"], LENGTH // 4 // 16 + 3)

    def test_all_at_once(self) -> None:
        _, reports = self.recall(f"keydiff=on keydiff.budget={LENGTH // 2} kvreviver=on kvreviver.budget=0.3 hshare=on "
                                 "hshare.top=100 memshare=on")
        self.assertTrue(all(r["generated_tokens"] for r in reports))


class MethodsInBytes(Methods):
    kv_type, space = "int8", "model-int8"


class MethodsInHalfBytes(Methods):
    kv_type, space = "int4", "model-int4"


if __name__ == "__main__":
    if not all(os.environ.get(name) for name in ("KVD", "KVCTL", "KVLM")):
        print("skipped: KVD, KVCTL and KVLM are not set")
        sys.exit(77)
    unittest.main()
