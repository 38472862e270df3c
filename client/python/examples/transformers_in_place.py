# SPDX-License-Identifier: Apache-2.0
"""transformers with the pool, in place: python transformers_in_place.py MODEL TEXT-FILE QUESTION... ($KVD_SOCKET)

Run it in several terminals at once: only the first one computes the text.
"""
import sys
from time import perf_counter

import kvd
from kvd.engines.transformers import KvdCache, open_space
from transformers import AutoModelForCausalLM, AutoTokenizer

path, text, questions = sys.argv[1], open(sys.argv[2]).read(), sys.argv[3:]
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvd")
with kvd.connect() as daemon, open_space(daemon, model) as space:
    for question in questions:
        inputs = tokenizer(f"{text}Question: {question}\nAnswer:", return_tensors="pt")
        start = perf_counter()
        with KvdCache(model, space, inputs.input_ids) as cache:
            output = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
        n = inputs.input_ids.shape[1]
        answer = tokenizer.decode(output[0, n:], skip_special_tokens=True).split("\n")[0]
        print(f"{question}{answer}   ({cache.found} of {n} tokens were there, {perf_counter() - start:.3f} s)")
