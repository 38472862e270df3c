# SPDX-License-Identifier: Apache-2.0
"""The judge's results as findings: tables of losses and recalls, and claims with their verdicts."""

from __future__ import annotations

from math import exp

from certainty import Recall, better, mean_difference, together
from findings import FAILS, NOT_SHOWN, NOT_TRIED, Aim, Claim, Findings, Plot, Table, compared, verdict

from . import again, plan
from .rows import CHUNKED, FULL, FULL_POOL, KVD, PAPER, REVIVED, ROWS, SELECTED, SHARED, SMALLER, TOGETHER, name
from .ruler import TASKS
from .store import Store

RIVALS = ("SnapKV", "TOVA", "StreamingLLM")     # those of KeyDiff's paper that keep what attention or a window says
INDEPENDENT = "KeyDiff (kvpress)"

RECALLS = ((name(REVIVED, 0.25), 0.95), (name(REVIVED, 0.1), 0.95), (name(SELECTED, 0.25), 0.95), (TOGETHER, 0.9))


class Results:
    """What the store has of a plan, by row."""

    def __init__(self, store: Store, measured: plan.Plan) -> None:
        self.store, self.plan = store, measured
        self.able = {length: plan.able(store, measured, length) for length in measured.lengths}

    def losses(self, row: str) -> dict[str, float]:
        """Mean negative log likelihoods by text."""
        return {key[3]: it["loss"] for key, it in self.store.found.items() if key[:2] == (row, plan.LOSS)
                and key[2] == self.plan.window // 2}

    def lost(self, row: str, other: str = FULL) -> tuple[float, float, int] | None:
        """How much more than another row, half of the interval, and the number of texts that both have read."""
        a, b = self.losses(row), self.losses(other)
        both = sorted(a.keys() & b.keys())
        return (*mean_difference([a[it] for it in both], [b[it] for it in both]), len(both)) if both else None

    def recall(self, row: str, task: str, length: int) -> Recall | None:
        return plan.recall(self.store, row, task, length, self.plan.questions)

    def all(self, row: str, length: int) -> Recall | None:
        """The questions of all tasks that the full cache can do. Each question is there once."""
        each = [self.recall(row, task, length) for task in self.able.get(length, [])]
        return together([it for it in each if it]) if each and all(each) else None


def more(lost: tuple[float, float, int] | None) -> str | None:
    return None if lost is None else f"{lost[0]:+.4f} +-{lost[1]:.4f}"


def table_of_losses(it: Results, width: int) -> Table:
    full = it.losses(FULL)
    table = Table(f"Loss on {len(full)} texts: {it.plan.window // 2} tokens are kept as the row says, the next "
                  f"{it.plan.window // 2} are scored",
                  ["what is kept", "of a 16-bit cache", "loss (nats a token)", "perplexity",
                   "more than the full cache"])
    for row in ROWS:
        losses = list(it.losses(row.name).values())
        if losses:
            mean = sum(losses) / len(losses)
            table.rows.append([row.name, f"{row.bytes(width):.0%}", f"{mean:.4f}", f"{exp(mean):.2f}",
                               more(it.lost(row.name))])
    table.note = ("The difference is the mean over texts, on the same texts, with Student's interval of 95 %. Pieces "
                  "of one document count as texts. Scored tokens see each other exactly, except where "
                  "a selection is read (hshare=on).")
    return table


def table_of_recalls(it: Results, length: int, width: int) -> Table:
    able = it.able[length]
    table = Table(f"Recall at {length} tokens, {it.plan.questions} questions a task",
                  ["what is kept", "of a 16-bit cache", *TASKS, "all that count", "against the full cache"],
                  note="Only tasks count of which the full cache answers half: "
                  f"{', '.join(able) or 'none'}. Of the others, only the full cache was asked.")
    full = it.all(FULL, length)
    for row in ROWS:
        mine = it.all(row.name, length)
        each = [it.recall(row.name, task, length) for task in TASKS]
        if any(each):
            table.rows.append([row.name, f"{row.bytes(width):.0%}", *(f"{r.value:.2f}" if r else None for r in each),
                               str(mine) if mine else None, compared(mine, full) if mine and full else None])
    return table


def said_again(it: Results) -> dict[str, list[int]]:
    """Shared blocks and all blocks, by kind, of all texts."""
    each = [found["shared"] for key, found in it.store.found.items() if key[:2] == (SHARED.name, plan.SAID)]
    return {kind: [sum(one[kind][i] for one in each) for i in (0, 1)] for kind in (again.NEW, again.AGAIN, again.OTHER)
            } if each else {}


def table_of_sharing(it: Results) -> Table:
    table = Table("Text that is said again, in steps of reasoning (memshare=on)", ["text", "blocks", "of them shared"])
    table.rows = [[kind, n, f"{shared / n:.0%}"] for kind, (shared, n) in said_again(it).items()]
    losses = [found for key, found in it.store.found.items() if key[:2] == (SHARED.name, plan.SAID)]
    lost = mean_difference([one["loss"] for one in losses], [one["plain"] for one in losses])
    table.note = (f"The loss on {again.BEHIND} tokens that follow is {more((*lost, len(losses)))} nats a token more than"
                  " without, on the same texts.")
    return table


def aims_of_sharing(it: Results) -> list[Aim]:
    found = said_again(it)
    if not found:
        return []
    (wrong, new), (right, repeated) = found[again.NEW], found[again.AGAIN]
    return [Aim("memshare=on shares 90 % of the blocks that are said again word by word",
                f"{right} of {repeated}", "reached" if right >= 0.9 * repeated else "missed"),
            Aim("memshare=on shares 1 % of the blocks of unlike text, at most",
                f"{wrong} of {new}", "reached" if wrong <= 0.01 * new else "missed")]


def claim_of_no_loss(it: Results) -> Claim:
    """KeyDiff in the paper's regime: long contexts, in chunks, little left out."""
    said = ("Within 0.04 % of the full cache at a budget of 8 K, about 23 % less memory; 1.5 % at 6 K, 33 % less "
            "(abstract; LongBench, Llama 3.1 8B and 3.2 3B)")
    words, worse = [], False
    for share, least in PAPER:
        for length in it.plan.lengths:
            mine, full = it.all(name(CHUNKED, share), length), it.all(FULL, length)
            if length >= least and mine and full:
                words.append(f"{share:.0%} of {length} tokens {compared(mine, full)}")
                worse = worse or better(full, mine) is True
    if not words:
        return Claim(said, f"contexts here have up to {max(it.plan.lengths)} tokens", NOT_TRIED)
    return Claim(said, "; ".join(words), FAILS if worse else NOT_SHOWN,
                 "" if worse else "so few questions cannot show 0.04 %")


def claims_of_comparison(it: Results) -> list[Claim]:
    """KeyDiff against the best of the others, each budget by itself, at the longest length whose tasks can be done."""
    claims = []
    for length in [n for n in it.plan.lengths if it.able[n]][-1:]:
        for share in (0.5, 0.25):
            rivals = {r: found for r in RIVALS if (found := it.all(name(f"{r} (kvpress)", share), length))}
            for form in (KVD, INDEPENDENT, "KeyDiff in chunks of 128 (kvpress)"):
                mine = it.all(name(form, share), length)
                if mine and rivals:
                    claims.append(against(f"{form}, {share:.0%} of {length} tokens", mine, rivals))
    return claims


def against(ours: str, mine: Recall, rivals: dict[str, Recall]) -> Claim:
    best = max(rivals, key=lambda it: rivals[it].value)
    result = verdict(better(mine, rivals[best]))
    return Claim("Better than attention-based and window policies at equal budgets (Table 1, Fig. 6)",
                 f"{ours}, against {best}, the best of {len(rivals)}: {compared(mine, rivals[best])}", result,
                 "the difference may be chance" if result == NOT_SHOWN else "")


def aims(it: Results) -> list[Aim]:
    """kvd's own: the pool changes nothing, its KeyDiff is as good as another's, and worth its bytes."""
    found, lost = [], it.lost(FULL_POOL)
    if lost:
        found.append(Aim("a full cache in the pool has the loss of transformers alone, within 0.001 nats",
                         f"{more(lost)}, n = {lost[2]}", "reached" if abs(lost[0]) + lost[1] <= 1e-3 else "missed"))
    for share, dtype in ((0.5, "int8"), (0.25, "int4")):
        found += [no_more_than(it, share, name(INDEPENDENT, share), "as many tokens"),
                  no_more_than(it, share, SMALLER.format(dtype), "about as many bytes")]
    found += [recalls(it, row, least) for row, least in RECALLS]
    return [aim for aim in found if aim] + aims_of_sharing(it)


def recalls(it: Results, row: str, least: float) -> Aim | None:
    """The aim that a row answers at least such a share of what the full cache answers, at the longest length asked."""
    for length in reversed(it.plan.lengths):
        mine, full = it.all(row, length), it.all(FULL, length)
        if mine and full:
            return Aim(f"{row}: recall of at least {least} of the full cache's at {length} tokens", compared(mine, full),
                       "reached" if mine.value >= least * full.value else "missed")
    return None


def no_more_than(it: Results, share: float, other: str, equal: str) -> Aim | None:
    """The aim that the pool's KeyDiff loses no more than another row."""
    lost = it.lost(name(KVD, share), other)
    if not lost:
        return None
    reached, certain = lost[0] <= 0, abs(lost[0]) > lost[1]
    return Aim(f"{name(KVD, share)} of the tokens, loses no more than {other}, with {equal}",
               f"{more(lost)} nats, n = {lost[2]}",
               f"{'reached' if reached else 'missed'}{'' if certain else ', within chance'}")


def plots(it: Results) -> list[Plot]:
    """Recall against the share of tokens, at each length."""
    made = []
    for length in it.plan.lengths:
        series: dict[str, list[tuple[float, ...]]] = {}
        full = it.all(FULL, length)
        for row in ROWS:
            mine = it.all(row.name, length)
            if mine and row.share < 1 and row.stays == row.reads == 1:
                line = series.setdefault(row.name.rpartition(",")[0], [])
                line.append((100 * row.share, mine.value, *mine.interval()))
        if full and series:
            made.append(Plot(f"Recall at {length} tokens", "tokens kept, % of the context", "recall",
                             {what: [*sorted(line), (100, full.value)] for what, line in series.items()}, (0, 1.05)))
    return made


def findings(store: Store, measured: plan.Plan, width: int, model: str, form: str) -> Findings:
    it = Results(store, measured)
    found = Findings("judge", f"KeyDiff and others, judged by {model}",
                     f"A pretrained model reads natural text, and hidden facts are asked for ({form}). Every row "
                     "computes the context exactly, in one pass, and then keeps what its name says, before the "
                     "question is seen; kvd's rows in chunks do so after each chunk, and compute the next with what "
                     "was kept; those of int8 and int4 (a scale and a least number of 16 bits for each token and head, "
                     "counted) and fp8 (E4M3, without scales) round all that they store, and attend to that. All rows keep the question and the answer "
                     "whole. Rows called kvd run in transformers in place, through a pool; kvpress's presses are in "
                     "transformers' own cache.",
                     "Blocks of int8. KeyDiff, if keys and values must keep their type and "
                     "losses like these are affordable: look at the row of your budget.")
    found.tables = [table_of_losses(it, width), *(table_of_recalls(it, n, width) for n in measured.lengths),
                    *([table_of_sharing(it)] if said_again(it) else [])]
    found.claims = [claim_of_no_loss(it), *claims_of_comparison(it)]
    found.aims, found.plots = aims(it), plots(it)
    return found


def summary(found: Findings) -> str:
    """Tables, claims and aims as text."""
    lines = []
    for table in found.tables:
        lines += ["", table.title, *(" | ".join("-" if v is None else str(v) for v in row)
                                     for row in [table.columns, *table.rows]), table.note]
    lines += ["", *(f"{it.verdict:14} {it.measured}" for it in found.claims),
              *(f"{it.verdict:14} aim: {it.text}: {it.measured}" for it in found.aims)]
    return "\n".join(lines)
