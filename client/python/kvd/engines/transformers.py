# SPDX-License-Identifier: Apache-2.0
"""transformers on the pool: 5.19 and later, on the processor; tested with 5.23.0 (and 5.19.0), torch 2.13.0.

In place: keys and values are written into blocks of the pool and read there, by any number of processes.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvd")     # after this module was imported
    space = open_space(kvd.connect(), model)
    with KvdCache(model, space, input_ids) as cache:
        model.generate(input_ids, past_key_values=cache)

What another request computed of input_ids is used and not computed again; what this one computes is there for the
next as soon as a block is full. A cache is for one sequence, and its end lets go of everything. Where the pool is full
or the daemon goes away, the request goes on in memory of its own (`cache.private`). A model with
attn_implementation="kvd" and another cache, or none, computes as with "sdpa".

By copy: for any attn_implementation; a plain DynamicCache is filled and stored.

    cache, n = load_prefix(space, model, input_ids)
    output = model.generate(input_ids, past_key_values=cache)
    store(space, cache, output)

Which models: open_space() runs the model on one token, and looks at the keys and values that it makes. Refused by
name: batches, beams and other ways to several sequences, padding and other masks, inputs besides token ids (pictures,
token types), assisted decoding; models with sliding windows, soft caps, sinks or other attention than causal, keys and
values of different shapes (MLA), attention that does not go through attn_implementation (in place; BLOOM, GPT-J), RoPE
that changes with the length; training, autocast, weights loaded in inference_mode, devices other than the processor,
and a space that was made for other weights.
"""

from ._common import missing

__all__ = ["KvdCache", "load_prefix", "open_space", "store"]

try:
    from ._transformers import KvdCache, load_prefix, open_space, store
except ImportError as error:     # this page can be read all the same
    __getattr__ = missing(error)
