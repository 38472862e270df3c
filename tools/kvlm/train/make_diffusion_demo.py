"""Writes the questions for the diffusion model: `python make_diffusion_demo.py`.

`../demo/diffusion.jsonl`, an object per line. Ten lines share each prefix, which begins with `<bos>` and contains facts; a
prompt continues with its own text and ends with a question about the prefix. The sets differ in the prefix's share
of prefix and prompt together. Everything follows from the seed, and no question is chosen or dropped by whether the
model can answer it. `kvlm --prompts` reads the file as it is, and so does `denoise.py --prompts`.

    set, kind                 which prefix (its share in percent), which kind of question (`infill_cases.py`)
    document, prompt, answer  as text: the prefix, what follows it, and what is right
    *_ids                     as token ids: prefix with `<bos>`; answer with its newline and one `<eos>`
    gen_length, steps         tokens of the region, and steps to denoise it in
    ratio, ratio_region       prefix / (prefix + prompt), prefix / (prefix + prompt + region)
"""

from __future__ import annotations

import json
from pathlib import Path

import vocabulary as v
from corpus import NEWLINE, TOKENS
from infill import Infiller
from infill_cases import MAKERS, Case, Page

OUT = Path(__file__).parent.parent / "demo" / "diffusion.jsonl"
SEED = "diffusion-demo"
# Share of the prefix in percent, its length; None: the prompt is the question alone.
SETS = ((30, 150), (50, 220), (70, 300), (85, 360), (95, 450), (None, 330), (None, 480))
# Of the kinds that training made reliable (`../diffusion/README.md`); the others are in the evaluation.
KINDS = ("known-6", "known-8", "single", "known-6", "work-7", "known-6", "known-8", "work-4", "known-6", "known-8")
LINKS, FACTS, FACT_SHARE, SLACK = 7, 10, 0.6, 4
TOKENS_A_STEP = 2       # as BiCache (2 tokens a step, 256 in 128 steps) was measured


def sentences(writer: Infiller, told: list[tuple[int, ...]], length: int) -> list[tuple[int, ...]]:
    """These sentences among fillers, `SLACK` more or fewer than `length` tokens in all."""
    if sum(map(len, told)) > length:
        raise ValueError("more facts than fit")
    while True:
        made, total = list(told), sum(map(len, told))
        while total < length - SLACK:
            made.append(writer.filler())
            total += len(made[-1])
        if total <= length + SLACK:
            writer.rng.shuffle(made)
            return made


def shared(writer: Infiller, length: int) -> Page:
    """A prefix of about `length` tokens with facts and a chain."""
    links = min(LINKS, length // 40)
    facts = writer.facts(max(FACTS, int(length * FACT_SHARE / 9) - links - 1), 0.0)
    chain = writer.chain(links, {f.name for f in facts})
    told = [f.sentence() for f in facts + chain.facts()]
    return Page([v.BOS, *writer.paragraphs(sentences(writer, told, length - 3))], facts, chain)


def own(writer: Infiller, shown: Page, length: int) -> list[int]:
    """The prompt's own text before its question, with facts about other names."""
    if length < 12:
        return []
    taken = {f.name for f in shown.facts} | set(shown.chain.names)
    facts = [f for f in writer.facts(length // 24, 0.0) if f.name not in taken]
    return [i for s in sentences(writer, [f.sentence() for f in facts], length) for i in s]


def line(name: str, prefix: list[int], prompt: list[int], case: Case) -> dict:
    """One object of the file."""
    answer = [*case.answer, v.EOS]
    texts = [TOKENS.decode(ids) for ids in (prefix, prompt, case.answer)]
    assert [v.BOS, *TOKENS.encode(texts[0])] == prefix and TOKENS.encode(texts[1]) == prompt
    return {"set": name, "kind": case.kind, "document": texts[0], "prompt": texts[1], "answer": texts[2],
            "gen_length": len(answer), "steps": len(answer) // TOKENS_A_STEP,
            "ratio": round(len(prefix) / len(prefix + prompt), 4),
            "ratio_region": round(len(prefix) / len(prefix + prompt + answer), 4),
            "prefix_ids": prefix, "prompt_ids": prompt, "answer_ids": answer}


def lines(share: int | None, length: int) -> list[dict]:
    """The lines that share one prefix."""
    writer = Infiller(f"{SEED}/{share}/{length}", held_out=True)
    shown = shared(writer, length)
    made = []
    for kind in KINDS:
        case = MAKERS[kind](writer, shown)
        rest = round(len(shown.ids) * (100 / share - 1)) - len(case.prompt) - 1 if share else 0
        prompt = [*own(writer, shown, rest), NEWLINE, *case.prompt]
        made.append(line(f"{share or 'question'}-{length}", shown.ids, prompt, case))
    return made


def main() -> None:
    made = [one for share, length in SETS for one in lines(share, length)]
    OUT.write_text("".join(json.dumps(one) + "\n" for one in made))
    for name in dict.fromkeys(one["set"] for one in made):
        ours = [one for one in made if one["set"] == name]
        ratios = sorted(one["ratio"] for one in ours)
        tokens = len(ours[0]["prefix_ids"])
        print(f"{name}: {len(ours)} lines, prefix {tokens} tokens, ratio {ratios[0]} to {ratios[-1]}")


if __name__ == "__main__":
    main()
