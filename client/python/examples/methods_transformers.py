# SPDX-License-Identifier: Apache-2.0
"""Ask about a text, and switch KeyDiff meanwhile: each question's cache then keeps so many tokens of every head.

    python methods_transformers.py MODEL TEXT < QUESTIONS       # one per line
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvd
from kvd.engines.transformers import KvdCache, open_space

path, text = sys.argv[1], open(sys.argv[2]).read()
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvd")
with kvd.connect() as daemon, open_space(daemon, model) as space:
    print(f"kvctl space set {space.name} keydiff=on keydiff.budget={len(tokenizer(text).input_ids) // 2}", flush=True)
    for question in sys.stdin:
        ids = torch.tensor([tokenizer(f"{text}Question: {question.strip()}\nAnswer:").input_ids])
        with KvdCache(model, space, ids) as cache:
            out = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
            answer = tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True)
            print(f"{len(cache.blocks)} blocks for {out.shape[1]} tokens:{answer.splitlines()[0]}", flush=True)
