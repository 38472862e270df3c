# SPDX-License-Identifier: Apache-2.0
"""SGLang with kvd, offline. Run it twice, or next to a server: the second reuses what the first computed.

    python sglang_shared.py MODEL
"""

import sys

import sglang

LINKER = {"linker": "Linker", "linker_module_path": "kvd.engines.sglang"}
CPU = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "dtype": "float32",
       "disable_cuda_graph": True, "disable_overlap_schedule": True, "grammar_backend": "none"}

if __name__ == "__main__":      # SGLang starts processes that read this file
    engine = sglang.Engine(
        model_path=sys.argv[1], page_size=16, max_total_tokens=8192, context_length=4096, log_level="error",
        enable_unified_cache_external_linker=True, unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config=LINKER, **CPU)
    document = "alder almond amber apple ash " * 100
    for question in ("birch", "cedar"):
        answer = engine.generate(document + question, {"temperature": 0, "max_new_tokens": 8})
        about = answer["meta_info"]
        print(f"{about['cached_tokens']} of {about['prompt_tokens']} tokens were there: {answer['text']!r}", flush=True)
    engine.shutdown()
