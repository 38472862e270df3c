# SPDX-License-Identifier: Apache-2.0
"""Connectors for inference engines, one module each. See pydoc kvd.engines.vllm (vLLM need not be installed).

vllm, vllm_copy, transformers, sglang, llama_cpp, lmcache.
"""
