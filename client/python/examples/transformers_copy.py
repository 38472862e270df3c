# SPDX-License-Identifier: Apache-2.0
"""transformers with the pool, by copy: python transformers_copy.py MODEL TEXT-FILE QUESTION... ($KVD_SOCKET)"""
import sys

import kvd
from kvd.engines.transformers import load_prefix, open_space, store
from transformers import AutoModelForCausalLM, AutoTokenizer

path, text, questions = sys.argv[1], open(sys.argv[2]).read(), sys.argv[3:]
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
with kvd.connect() as daemon, open_space(daemon, model) as space:
    for question in questions:
        inputs = tokenizer(f"{text}Question: {question}\nAnswer:", return_tensors="pt")
        cache, found = load_prefix(space, model, inputs.input_ids)
        output = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
        store(space, cache, output)
        n = inputs.input_ids.shape[1]
        answer = tokenizer.decode(output[0, n:], skip_special_tokens=True).split("\n")[0]
        print(f"{question}{answer}   ({found} of {n} tokens were there)")
