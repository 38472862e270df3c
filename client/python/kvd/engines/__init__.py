# SPDX-License-Identifier: Apache-2.0
"""Inference engines on the pool, a module each: pydoc kvd.engines.vllm, also where vLLM is not installed.

vllm, vllm_copy, transformers, sglang, llama_cpp, lmcache.
"""
