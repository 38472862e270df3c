# SPDX-License-Identifier: Apache-2.0
"""vLLM with its own cache, which loads from kvd's pool and stores there. Run it twice.

    python vllm_copy.py MODEL [SOCKET]
"""
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"      # vLLM in this process

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

model, socket = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
llm = LLM(model=model, dtype="float32", block_size=32, enforce_eager=True, kv_cache_memory_bytes=1 << 30,
          kv_transfer_config=KVTransferConfig(kv_connector="KvdCopyConnector",
              kv_connector_module_path="kvd.engines.vllm_copy", kv_role="kv_both",
              kv_connector_extra_config={"socket": socket}))
prompt = "Q 1 + 2 * 3 A " * 40
(answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16))
print(f"{answer.num_cached_tokens} of {len(answer.prompt_token_ids)} tokens were in the pool")
print(answer.outputs[0].text)
