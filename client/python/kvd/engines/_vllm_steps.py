# SPDX-License-Identifier: Apache-2.0
"""What is known of a vLLM's model, to share blocks of similar steps of reasoning: which tokens end a step, and how keys are
rotated."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers import rotary_embedding
from vllm.tokenizers import cached_tokenizer_from_config

from ._rotation import frequencies_of, theta_of

logger = init_logger("vllm." + __name__)

NEWLINES = ("\n", "\u010a", "<0x0A>")     # as vocabularies write them


def _ends_in(tokenizer: Any) -> frozenset[int]:
    """Return the tokens whose text ends with an empty line."""
    some = [i for name, i in tokenizer.get_vocab().items() if any(it in name for it in NEWLINES)]
    return frozenset(i for i in some if tokenizer.decode([i]).endswith("\n\n"))


class Steps:
    """dim: of a head. loaded: the model is in this process, by the time that anything is asked. What takes a moment is found
    out then."""

    def __init__(self, config: VllmConfig, dim: int, loaded: bool):
        self.model, self.dim, self.loaded = config.model_config, dim, loaded
        self.theta = theta_of(self.model.hf_text_config)
        self.given = config.kv_transfer_config.get_from_extra_config("step_ends", None)
        if self.given is not None and not (isinstance(self.given, list) and all(type(it) is int for it in self.given)):
            raise ValueError(f"step_ends is a list of ids of tokens, and not {self.given!r}")

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens that end a step."""
        if self.given is not None:
            return frozenset(self.given)
        try:
            tokenizer = cached_tokenizer_from_config(self.model)
            return _ends_in(tokenizer) if tokenizer else frozenset()
        except Exception as error:      # of anybody's tokenizer: an engine goes on without steps
            logger.warning("kvd: the tokens that end a step of reasoning: %s", error)
            return frozenset()

    @cached_property
    def frequencies(self) -> torch.Tensor | None:
        """Radians per position [dim / 2]; None if keys are rotated otherwise. A process that has the model sees how."""
        made = rotary_embedding._ROPE_DICT.values()
        if not all(map(self._is_plain, made)) or self.loaded and not made:
            return None
        return frequencies_of(self.model.hf_text_config, self.dim)

    def _is_plain(self, it: rotary_embedding.RotaryEmbedding) -> bool:
        return (type(it) is rotary_embedding.RotaryEmbedding and it.is_neox_style
                and it.head_size == it.rotary_dim == self.dim and it.base == self.theta)

    def missing(self) -> str:
        """Return why steps are not compared; "": they are."""
        if self.frequencies is None:
            return "this model does not rotate its keys as Llama does, without scaling"
        if not self.ends:
            return 'it is not known which tokens end a step: name their ids in the extra configuration ("step_ends")'
        return ""
