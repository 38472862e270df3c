# SPDX-License-Identifier: Apache-2.0
"""Diffusion language models (LLaDA, Dream) in transformers, whose requests share a prefix in the pool: BiCache. For
transformers 5.19 and later, on the CPU; tested with 5.23.0, torch 2.13.0.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvd_bidirectional")   # after this import
    with kvd.connect() as daemon, open_space(daemon, model) as space:
        answer = generate(model, space, prefix_ids, prompt_ids, gen_length=128, steps=64, mask_token_id=126336)
        print(tokenizer.decode(answer.tokens))

A region of masks behind the prompt is denoised: a step computes the model, and replaces the masks whose most likely token is
most certain, gen_length / steps of them (LLaDA's low-confidence remasking at temperature 0, over the whole region). Every
token sees all others.

BiCache ("Enabling KV Caching of Shared Prefix for Diffusion Language Models", arXiv:2606.07571) is a switch of the space,
off by default: without it, every step computes all tokens in all layers. With it (kvctl space set NAME bicache=on), the keys
and values of the prefix's first b layers come from the pool, where attention reads them in place, and only what is behind the
prefix is computed. The prefix's other layers are recomputed every bicache.delta steps from the state after layer b, which is
stored with the keys. One process computes a missing prefix, and the others wait for it. If it dies, another one computes the
prefix. If the pool is full or the daemon ends, the request continues in private memory (`answer.refused`).

The space's table says how large b is, for the prefix's share of a request. It is made from samples of requests like yours;
without a table, b is 1.

    profile(model, space, prefix_ids, prompt_ids, gen_length=128, step=10)      # on a few requests
    kvctl profile build NAME

It takes decoders of the Llama family (Llama, Mistral, Qwen 2 and 3): model.model has embed_tokens, layers, norm and
rotary_emb, attention goes through attn_implementation, and every layer attends to everything. LLaDA is a Llama, once its
weights have Llama's names (attn_out is o_proj, ff_proj gate_proj, ff_out down_proj), and Dream's are those of a Qwen 2, with
logits that are one row early (shift=True). Their own code, which has another attention, is refused. open_space() and the first
generate() examine the model: they compare a pass with the model's own. If the model itself is called, with
attn_implementation="kvd_bidirectional", every token sees all others but padding, too.

Refused by name: models as in kvd.engines.transformers (but not because they are bidirectional), models that do more than
their parts show (scaled logits), sliding windows, soft caps, attention sinks, batches, training, and block
diffusion behind a causal prefix (DiffusionGemma), whose keys and values do not change while it denoises.
"""

from ._common import missing

__all__ = ["Answer", "generate", "open_space", "profile"]

try:
    from ._diffusion import Answer, generate, profile
    from ._diffusion_model import open_space
except ImportError as error:     # the documentation can be read without the engine
    __getattr__ = missing(error)
