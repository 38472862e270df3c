"""Writes the demo documents and their questions: `python make_demo.py`.

Per document N, in `../demo`: `document-N.txt`, about 2,000 tokens with `<bos>`; `questions-N.jsonl`,
short questions whose answer is one line; `reasoning-N.jsonl`, questions answered in many steps up to
`<eos>`. A prompt is the document followed by the question. Everything follows from the seed, and no
question is chosen or dropped by whether the model can answer it.
"""

from __future__ import annotations

import json
from pathlib import Path

import vocabulary as v
from cases import find
from corpus import TOKENS, Chain, Fact, Writer

SEED = "demo"
LENGTHS = range(1990, 2011)
EDGE = 0.02             # facts must begin and end within this share of the document
FACTS, LINKS, QUESTIONS, SHORT_CHAINS = 70, 12, 20, 4
DEMO = Path(__file__).parent.parent / "demo"


def text(ids: list[int] | tuple[int, ...]) -> str:
    return TOKENS.decode([i for i in ids if i != v.EOS])


def line(question: tuple[int, ...], answer: list[int] | tuple[int, ...], depth: float) -> str:
    """One JSON line; the answer is what generation must give up to where it stops."""
    return json.dumps({"prompt": text(question), "answer": text(answer), "depth": round(depth, 3)}) + "\n"


def draw(seed: str) -> tuple[Writer, list[int], list[tuple[float, Fact]], Chain]:
    """A document of the wanted length with facts from end to end, its lone facts with depths, its chain."""
    for attempt in range(1000):
        writer = Writer(f"{seed}/{attempt}", held_out=True)
        ids, told, chain = writer.document(max(LENGTHS) - 10, 0.2, 8 * FACTS / max(LENGTHS), LINKS)
        ids = [v.BOS, *ids]
        placed = sorted(((find(ids, f.core()) / len(ids), f) for f in told if f.relation != v.HEIR),
                        key=lambda pair: pair[0])
        if len(ids) in LENGTHS and placed[0][0] < EDGE and placed[-1][0] > 1 - EDGE:
            return writer, ids, placed, chain
    raise RuntimeError("no document of the wanted length")


def spread(ordered: list[tuple[float, Fact]], count: int) -> list[tuple[float, Fact]]:
    """`count` facts at even steps, the first and the last among them."""
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def write(number: int) -> None:
    """Writes the three files of one document."""
    writer, ids, facts, chain = draw(f"{SEED}/{number}")
    questions = [line(fact.question(), fact.answer(), depth) for depth, fact in spread(facts, QUESTIONS)]
    for _ in range(SHORT_CHAINS):
        part = chain.part(writer.rng)
        questions.append(line(part.question(), part.answer(), first_depth(ids, part)))
    tails = [Chain(chain.names[start:]) for start in (0, LINKS // 2)]
    reasoning = [line(tail.task(), tail.work(), first_depth(ids, tail)) for tail in tails]
    (DEMO / f"document-{number}.txt").write_text(text(ids[1:]))
    (DEMO / f"questions-{number}.jsonl").write_text("".join(questions))
    (DEMO / f"reasoning-{number}.jsonl").write_text("".join(reasoning))
    print(f"document-{number}: {len(ids)} tokens with <bos>, {len(questions)} questions, {len(reasoning)} reasonings")


def first_depth(ids: list[int], chain: Chain) -> float:
    """Depth of the earliest fact a chain needs."""
    return min(find(ids, link.core()) for link in chain.facts()[:-1]) / len(ids)


def main() -> None:
    DEMO.mkdir(exist_ok=True)
    for number in (1, 2):
        write(number)


if __name__ == "__main__":
    main()
