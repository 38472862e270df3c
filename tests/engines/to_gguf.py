# SPDX-License-Identifier: Apache-2.0
"""Converts a folder of kvlm (Llama architecture, safetensors, vocab in tokenizer.json) to a GGUF file in f32.

    python to_gguf.py FOLDER FILE

llama.cpp rotates neighbouring pairs, so the rows of the query and key projections are permuted. It has no tokenizer of
this kind. The vocabulary turns ids into text, but not text into the same ids.
"""

import json
import sys

import gguf
import numpy as np
from safetensors.numpy import load_file


def permute(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def describe(w: gguf.GGUFWriter, c: dict) -> None:
    w.add_name("kvlm")
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_rope_dimension_count(c["head_dim"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_vocab_size(c["vocab_size"])
    w.add_file_type(gguf.LlamaFileType.ALL_F32)


def vocabulary(w: gguf.GGUFWriter, tokens: list[str]) -> None:
    kinds = {"<pad>": gguf.TokenType.CONTROL, "<bos>": gguf.TokenType.CONTROL, "<eos>": gguf.TokenType.CONTROL,
             "<unk>": gguf.TokenType.UNKNOWN}
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([-float(i) for i in range(len(tokens))])
    w.add_token_types([kinds.get(it, gguf.TokenType.BYTE if it.startswith("<0x") else gguf.TokenType.NORMAL)
                       for it in tokens])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(3)


def weights(w: gguf.GGUFWriter, c: dict, tensors: dict[str, np.ndarray]) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c["num_hidden_layers"])
    for name, x in tensors.items():
        if name == "lm_head.weight" and c.get("tie_word_embeddings"):
            continue
        x = x.astype(np.float32)
        if name.endswith("q_proj.weight"):
            x = permute(x, c["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            x = permute(x, c["num_key_value_heads"])
        w.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(x))


def main(folder: str, file: str) -> None:
    with open(f"{folder}/config.json") as f:
        c = json.load(f)
    with open(f"{folder}/tokenizer.json") as f:
        ids = json.load(f)["model"]["vocab"]
    w = gguf.GGUFWriter(file, "llama")
    describe(w, c)
    vocabulary(w, sorted(ids, key=ids.get))
    weights(w, c, load_file(f"{folder}/model.safetensors"))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
