# SPDX-License-Identifier: Apache-2.0
"""llama-cpp-python with kvd. Run it twice: the second run reuses what the first computed.

    python llama_cpp_shared.py model.gguf
"""

import sys
import time

from llama_cpp import Llama

from kvd.engines.llama_cpp import Cache

llm = Llama(sys.argv[1], n_ctx=4096, flash_attn=True, verbose=False)
cache = Cache(llm)
llm.set_cache(cache)

document = llm.tokenize(b"the lighthouse keeper writes the weather into a book. " * 40)[:1800]
for question in (b"When", b"Where"):
    prompt = document + llm.tokenize(question, add_bos=False)
    there = cache.share.space.match(prompt)
    start = time.perf_counter()
    answer = llm.create_completion(prompt, max_tokens=8, temperature=0)
    print(f"{there} of {len(prompt)} tokens were there; {1e3 * (time.perf_counter() - start):.0f} ms:"
          f" {answer['choices'][0]['text']!r}")
