# SPDX-License-Identifier: Apache-2.0
"""Ask a diffusion model (LLaDA, Dream) about a text, which is computed once for all questions and processes.

    python diffusion_bicache.py MODEL TEXT < QUESTIONS      # one per line; the first four also make BiCache's table
    kvctl profile build NAME                                # NAME is printed
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvd
from kvd.engines.diffusion import generate, open_space, profile

LENGTH = 32
path, text = sys.argv[1], open(sys.argv[2]).read()
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvd_bidirectional")
with kvd.connect() as daemon, open_space(daemon, model) as space:
    space.set("bicache", 1)
    prefix = tokenizer(text).input_ids
    for n, question in enumerate(sys.stdin):
        prompt = tokenizer(f"\nQuestion: {question.strip()}\nAnswer:", add_special_tokens=False).input_ids
        answer = generate(model, space, prefix, prompt, gen_length=LENGTH)
        words = tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
        print(f"{space.name}: {answer.depth} layers shared, {answer.found} found, "
              f"{answer.computed / answer.whole:.2f} computed: {words}", flush=True)
        if n < 4:
            profile(model, space, prefix, prompt, gen_length=LENGTH, step=10)
