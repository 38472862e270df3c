# SPDX-License-Identifier: Apache-2.0
"""What is compared: a row for each way to keep a context. To add one of those kinds, add a line to ROWS.

All rows keep a context before the question is seen, and all of the question and the answer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

ALONE, POOL, PRESS = "transformers", "pool", "kvpress"


@dataclass(frozen=True)
class Row:
    """`share` of the context's tokens is kept in every head, or in a mean over heads (KVzip); or all of them in blocks of
    `dtype`. `chunk`: it is reduced after each so many tokens; 0: once, after all. In the pool: `stays` of the blocks, of which
    those that leave have a copy elsewhere (KVReviver); `reads` of the tokens are read by each decoded one (HShare); `scorer`
    decides what is kept, instead of KeyDiff."""

    name: str
    how: str
    share: float = 1.0
    dtype: str = ""
    press: str = ""
    chunk: int = 0
    stays: float = 1.0
    reads: float = 1.0
    scorer: str = ""
    quick: bool = True          # also asked with --quick
    least: int = 0              # for contexts of at least so many tokens

    def bytes(self, width: int) -> float:
        """The share of a full cache of 16 bits that it takes, for heads of `width` numbers."""
        return self.share * self.stays * (stored_bytes(self.dtype, width) / (2 * width) if self.dtype else 1)


def stored_bytes(dtype: str, width: int) -> float:
    """Bytes of a head's key or value of `width` numbers. int8 and int4 have a scale and a least number of 16 bits for each
    64."""
    return width if dtype == "fp8" else width * int(dtype[3:]) / 8 + -(-width // 64) * 4


FULL, FULL_POOL = "full cache, transformers", "kvd, full cache"


def name(what: str, share: float) -> str:
    return f"{what}, {share:.0%}"


SMALLER = "kvd, blocks of {}"
KVD, CHUNKED = "kvd, keydiff=on", "kvd, keydiff=on in chunks of 128"
ZIPPED, REVIVED, SELECTED = "kvd, KVzip's scores", "kvd, kvreviver=on", "kvd, hshare=on, reading"
TOGETHER = "kvd, keydiff=on, 90%, of which 55% stay (kvreviver=on), reading 25% (hshare=on)"
PRESSES = ("KeyDiff", "KeyDiff in chunks of 128", "SnapKV", "TOVA", "StreamingLLM", "ExpectedAttention", "KVzip")
PAPER = ((0.77, 6000), (0.67, 6000))    # shares and the least lengths of the paper's regime of small losses
ROWS = [
    Row(FULL, ALONE),
    Row(FULL_POOL, POOL),
    *(Row(name(KVD, share), POOL, share) for share in (0.75, 0.5, 0.25)),
    Row(name(CHUNKED, 0.5), POOL, 0.5, chunk=128),
    Row(name(ZIPPED, 0.25), POOL, 0.25, scorer="kvzip"),
    *(Row(name(REVIVED, stays), POOL, stays=stays) for stays in (0.25, 0.1)),
    *(Row(name(SELECTED, reads), POOL, reads=reads) for reads in (0.25, 0.125)),
    Row(TOGETHER, POOL, 0.9, stays=0.55, reads=0.25),
    *(Row(name(CHUNKED, share), POOL, share, chunk=128, least=least) for share, least in PAPER),
    *(Row(SMALLER.format(dtype), POOL, dtype=dtype) for dtype in ("int8", "fp8", "int4")),
    *(Row(name(f"{press} (kvpress)", share), PRESS, share, press=press,
          quick=share == 0.25 or press not in ("KVzip", "KeyDiff in chunks of 128"))
      for share in (0.5, 0.25) for press in PRESSES),
]

SHARED = Row("kvd, memshare=on", POOL)       # for what is said again only


def chosen(quick: bool, length: int, presses: Collection[str], only: Collection[str] = ()) -> list[Row]:
    """The rows for contexts of a length, without those of presses that cannot be used; only: the full cache, and those whose
    name contains one of these."""
    return [it for it in ROWS if length >= it.least and (it.quick or only or not quick)
            and (not it.press or it.press in presses) and (it.name == FULL or is_wanted(it, only))]


def is_wanted(row: Row, only: Collection[str]) -> bool:
    return not only or any(it in row.name for it in only)
