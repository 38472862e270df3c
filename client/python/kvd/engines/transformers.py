# SPDX-License-Identifier: Apache-2.0
"""Use the pool in transformers 5.19 and later, on the CPU; tested with 5.23.0 (and 5.19.0), torch 2.13.0.

In place: any number of processes write keys and values into blocks of the pool and read them there.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvd")     # after this module was imported
    space = open_space(kvd.connect(), model)
    with KvdCache(model, space, input_ids) as cache:
        model.generate(input_ids, past_key_values=cache)

If another request has computed a prefix of input_ids, it is reused. Blocks that this request computes are published as
soon as they are full. A cache is for one sequence; closing it releases all blocks. If the pool is full or the daemon
ends, the request continues in private memory (`cache.private`). A model with attn_implementation="kvd" and another
cache, or none, computes as with "sdpa".

By copy, for any attn_implementation: a plain DynamicCache is filled and stored.

    cache, n = load_prefix(space, model, input_ids)
    output = model.generate(input_ids, past_key_values=cache)
    store(space, cache, output)

Continuous batching, in place: all managers of one model use one pool, find what others have computed, and compute as
transformers does.

    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=options)
    use_pool(manager, kvd.connect())
    manager.start()

A block has options.page_size tokens (transformers' default of 256 shares little; 16 to 64 is better). num_blocks is how many
blocks a batch reads at most; the pool's size is the size of the cache. If the daemon ends, all requests fail with that error:
make another manager. Refused by name: models as below, cpu_offload_space, allow_block_sharing=False, tensor parallelism.

To check a model, open_space() runs it on one token, and examines its keys and values. Refused by name: batches, beams
and other uses of several sequences, padding and other masks, inputs other than token ids (pictures, token types),
assisted decoding; models with sliding windows, soft caps, sinks or attention that is not causal, keys and values of
different shapes (MLA), attention that does not go through attn_implementation (in place; BLOOM, GPT-J), RoPE that
depends on the length; training, autocast, weights loaded in inference_mode, devices other than the CPU, and spaces made
for other weights.
"""

from ._common import missing

__all__ = ["KvdCache", "load_prefix", "open_space", "store", "use_pool"]

try:
    from ._transformers import KvdCache, load_prefix, open_space, store
    from ._transformers_batching import use_pool
except ImportError as error:     # the documentation can be read without the engine
    __getattr__ = missing(error)
