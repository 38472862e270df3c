# SPDX-License-Identifier: Apache-2.0
"""Share computed prompts between contexts of llama.cpp in different processes.

    from llama_cpp import Llama
    from kvd.engines.llama_cpp import Cache, Share

    llm = Llama("model.gguf", n_ctx=8192, flash_attn=True)
    llm.set_cache(Cache(llm))                     # create_completion and the like; also of llama_cpp.server

    share = Share(llm)                            # or by hand, which saves set_cache's copy of the whole context
    share.restore(tokens)                         # before llm.generate(tokens) or llm.eval
    share.store()                                 # afterwards: what the context holds now

llama.cpp has no paged cache, so keys and values are copied: a sequence's state (llama_state_seq_get_data) is split into
blocks of 16 tokens, and a state is assembled again (llama_state_seq_set_data) from the longest stored prefix. Common
beginnings of documents are stored once, and tokens are compared, not only hashed. A program that uses llama.h without a
Llama object passes a Sequence: the library, the address of a llama_context, and the number of a sequence.

    share = Share(Sequence(ctypes.CDLL("libllama.so"), context, 0), model="model.gguf")
    have = share.restore(tokens)                  # decode tokens[have:] at position have
    share.store(tokens)                           # the tokens that the sequence holds

Contexts with the same model files, adapters and arithmetic share. A new Share decodes two tokens in its sequence, which
must be empty. The resulting state (keys, values, their types and format) is part of the space's fingerprint, like the
contents of the model's files. Contexts that compute other results use another space, or are refused (kvd.Mismatch) if
the space's name is given. An adapter that is set later is not noticed: pass salt=.

The format of a state is internal to llama.cpp and changes. The known format is that of b11549 (llama-cpp-python 0.3.36,
xllamacpp 2026.10.11549), with flash attention and any type of keys and values. States in other formats (transposed
values, as without flash attention; sliding windows, recurrent models, M-RoPE, a later version) are shared as a whole: a
prompt finds such a state only if it begins with all its tokens. Share.whole tells which applies, and a warning gives
the reason.

Refused: a context whose sequence is not empty; embeddings and encoders. Do not store a context that was shifted, or
that received anything but tokens. If there is no daemon or the pool is full, nothing is found or stored, with a
warning.
"""

from ._common import missing

__all__ = ["Cache", "Sequence", "Share"]

try:
    from ._llama_cpp import Cache, Sequence, Share
except ImportError as error:     # the documentation can be read without the engine
    __getattr__ = missing(error)
