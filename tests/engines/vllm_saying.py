# SPDX-License-Identifier: Apache-2.0
"""Has a vLLM say what a test wants: a logits processor (logits_processors=["vllm_saying:Saying"])."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Saying(AdapterLogitsProcessor):
    """The first tokens of an answer are those of SamplingParams.extra_args["say"]. Logprobs are the model's own."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams):
        say = (params.extra_args or {}).get("say")

        def only(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(answer) < len(say):
                logits = torch.full_like(logits, float("-inf"))
                logits[say[len(answer)]] = 0
            return logits

        return only if say else None
