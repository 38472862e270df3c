# SPDX-License-Identifier: Apache-2.0
"""The words of Python's keyword arguments, and their numbers, are those of ipc/base/enums.h."""

from __future__ import annotations

import re
from collections import defaultdict

from common import ROOT, kvd

ROW = re.compile(r"(?:FIRST|NEXT)\((\w+), (\d+), (\w+), KVD_\w+\)")


def main() -> int:
    words: dict[str, dict[str, int]] = defaultdict(dict)
    for name, number, word in ROW.findall((ROOT / "ipc" / "base" / "enums.h").read_text()):
        words[name][word] = int(number)
    assert words == kvd._geometry._CHOICES, (dict(words), kvd._geometry._CHOICES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
