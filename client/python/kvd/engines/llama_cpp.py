# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on kvd: what one process computed of a prompt, another one's context takes over.

    from llama_cpp import Llama
    from kvd.engines.llama_cpp import Cache, Share

    llm = Llama("model.gguf", n_ctx=8192, flash_attn=True)
    llm.set_cache(Cache(llm))                     # create_completion and the like; also of llama_cpp.server

    share = Share(llm)                            # or by hand, which saves set_cache's copy of the whole context
    share.restore(tokens)                         # before llm.generate(tokens) or llm.eval
    share.store()                                 # afterwards: what the context holds now

llama.cpp has no paged cache, so keys and values are copied: a sequence's state (llama_state_seq_get_data) is taken
apart into blocks of 16 tokens, and put together again (llama_state_seq_set_data) from the longest stored prefix.
Documents that begin alike are kept once, whoever computed them, and tokens are compared, not only hashed. A program
of one's own, with llama.h and no Llama object, gives a Sequence: the library, a llama_context's address, a sequence's
number.

    share = Share(Sequence(ctypes.CDLL("libllama.so"), context, 0), model="model.gguf")
    have = share.restore(tokens)                  # decode tokens[have:] at position have
    share.store(tokens)                           # the tokens that the sequence holds

Who shares: contexts with the same model files, adapters and arithmetic. When it is made, a Share decodes two tokens
in its sequence, which must be empty, and what comes out (keys, values, their types and their form) is part of the
space's fingerprint, as are the contents of the model's files: contexts that compute something else have another
space, or are refused (kvd.Mismatch) where the space's name was given. An adapter that is set later is not seen: give
salt=.

The form of a state is internal to llama.cpp and changes. What is known here is that of b11549 (llama-cpp-python
0.3.36, xllamacpp 2026.10.11549), with flash attention, any type of keys and values. Every other form (values
transposed, as without flash attention; sliding windows, recurrent models, M-RoPE, a later version) is shared as a
whole: a state is then found by a prompt that begins with all its tokens. Which of the two it is, Share.whole tells,
and a warning says why.

Refused: a context whose sequence is not empty; embeddings and encoders. Not to be stored: a context that was shifted,
or that was given anything but tokens. If the daemon is away or full, nothing is found or stored, which a warning
says.
"""

from ._common import missing

__all__ = ["Cache", "Sequence", "Share"]

try:
    from ._llama_cpp import Cache, Sequence, Share
except ImportError as error:     # this page can be read all the same
    __getattr__ = missing(error)
