# SPDX-License-Identifier: Apache-2.0
"""Use the pool in transformers 5.19 and later, on the CPU; tested with 5.23.0 (and 5.19.0), torch 2.13.0.

In place: any number of processes write keys and values into blocks of the pool and read them there.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvd")     # after this module was imported
    space = open_space(kvd.connect(), model)
    with KvdCache(model, space, input_ids) as cache:
        model.generate(input_ids, past_key_values=cache)

If another request has computed a prefix of input_ids, it is reused. Blocks that this request computes are published as
soon as they are full. Closing a cache releases all blocks. If the pool is full or the daemon ends, the request continues
in private memory (`cache.private`); if the daemon lives and does not answer for 5 s, it fails (kvd.TimedOut). A model with attn_implementation="kvd" and another cache, or none, computes as with
"sdpa", and as with "eager" if it has soft caps or attention sinks.

A batch has a row for each sequence, and padding on the left. Rows are found and published one by one; generate() begins
where the row of which least was found ends. After the end of its answer, a row goes on with padding, which is published,
too. With num_return_sequences, make the cache with as many rows.

    with KvdCache(model, space, input_ids, attention_mask=attention_mask) as cache:
        model.generate(input_ids, attention_mask=attention_mask, past_key_values=cache)

Blocks of quantised keys and values hold 1.9 (int8) or 3.6 (int4) times as many tokens of a 16-bit model in the same pool, and
blocks of numbers of 8 bits (fp8) 2 times as many:

    space = open_space(kvd.connect(), model, dtype="int4")

Each token and head has a scale for every 64 numbers (libkvd(3)). With int4, a token sees those of its own span of 128 tokens as
the model computed them, which each request keeps for itself, and prefixes are found in whole spans. On SmolLM2-135M, texts
lose about .001 nats with int8, and .01 with int4. Prefixes are shared by requests of the same dtype; methods read such blocks
as any others.

Models with sliding windows (Gemma 2 and 3, gpt-oss, Mistral, OLMo 3, Cohere 2), soft caps and attention sinks attend in
place. Their blocks have all layers' keys, also those that have left the windows.

A cache follows the methods that are on in its space when it is made (kvctl space set NAME keydiff=on):

    keydiff     with keydiff.budget=N, each layer and head of a row keeps N tokens: those of the first blocks
                (keydiff.sink_blocks), the newest (keydiff.recent_frac), and those whose keys differ most. A call computes its
                tokens with everything that was kept before it, and then leaves N: a prompt in one call is computed exactly.
                The budget is read after every call, and keydiff.slack more tokens are allowed while it decodes
    kvreviver   when the prompt is computed, most blocks leave the pool (kvreviver.budget stay); a query waits for those to
                which it gives more than kvreviver.wanted of its attention to blocks that may leave
    hshare      a decoded token sees the first tokens, the newest, and hshare.top others that its query selects
    memshare    blocks of a step of reasoning that repeats an earlier one are replaced by that one's; the cache must know which
                tokens end a step (`KvdCache(..., step_ends=)`), and keys must be rotated as Llama's are, without scaling

A cache can keep other tokens than KeyDiff does: those of the highest scores, which a function of its own gives each layer and
head (`KvdCache(..., scorer=, budget=)`, `KvdCache.reduce()`). The examples scorer_snapkv.py, scorer_h2o.py, scorer_rkv.py and
scorer_kvzip.py are such functions.

What such a cache computes behind the prompt is approximate, and not published. With keydiff or kvreviver, nothing of it is
published, and nothing is found, because its blocks change; nor is anything found for a batch. If the pool is full, one row
continues in private memory, and a batch fails with that error, as does a row whose blocks have left (kvreviver). A method that
cannot be followed has no effect, which a warning says.

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

To check a model, open_space() runs it on one token, and examines its keys and values. Refused by name: beams, padding on
the right and other masks, inputs other than token ids (pictures, token types), assisted decoding; models with chunked or
linear attention, or attention that is not causal, keys and values of different shapes (MLA), attention that does not go
through attn_implementation (in place; BLOOM, GPT-J), RoPE that depends on the length; training, autocast, weights loaded
in inference_mode, devices other than the CPU, and spaces made for other weights. By copy, in continuous
batching and with methods, sliding windows; by copy, several sequences, and storing quantised blocks.
"""

from ._common import missing

__all__ = ["KvdCache", "load_prefix", "open_space", "store", "use_pool"]

try:
    from ._transformers import KvdCache
    from ._transformers_copy import load_prefix, store
    from ._transformers_batching import use_pool
    from ._transformers_model import open_space
except ImportError as error:     # the documentation can be read without the engine
    __getattr__ = missing(error)
