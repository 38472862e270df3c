# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel: the package, with libkvd and libkvd_kernels inside. A backend for pip (PEP 517).

tools/build links both statically with everything except the C library, from the objects of the checkout's build folder.
Therefore the wheel needs no compiler and no other library where it is installed. It runs on Python 3.10 or later with a
C library that has the functions it uses, as its tag says (manylinux_2_34_x86_64). With -C cuda=enabled, which needs nvcc
and takes minutes longer, it has the kernels of kvd.Batch for GPUs. With -C library=PATH -C kernels=PATH
pip uses existing libraries; if these need other libraries, the tag is that of this machine (linux_x86_64).
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Collection

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARIES = {"library": ("client", "libkvd.so"), "kernels": ("kernels", "libkvd_kernels.so")}
PT_LOAD, PT_DYNAMIC, DT_NEEDED, DT_STRTAB = 1, 2, 1, 5
C_LIBRARY = {"libc", "libm", "libpthread", "libdl", "librt", "ld-linux-x86-64", "ld-linux-aarch64"}
METADATA = """Metadata-Version: 2.1
Name: kvd
Version: {version}
Summary: The KV cache of a kvd daemon, used in place: libkvd for Python
License: Apache-2.0
Requires-Python: >=3.10
"""
ENTRY_POINTS = """[vllm.general_plugins]
kvd = kvd.engines._vllm_layout:register
"""


def _run(*command: str) -> None:
    """Run a command without pip's isolation, which would hide the modules of Debian's meson."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}")


def build_libraries(build: Path, cuda: str) -> dict[str, bytes]:
    targets = {f"{name}.0": f"{folder}/{name}.{_version()}" for folder, name in LIBRARIES.values()}
    _run("sh", f"{ROOT}/tools/build")
    _run("sh", f"{ROOT}/tools/build", "--from", f"{ROOT}/build", "--build", str(build), "--buildtype=release",
         f"--cuda={cuda}", "--static_libs=true", "--b_sanitize=none", "--c_args=", *targets.values())
    Path(f"{build}.log").unlink()
    return {name: (build / target).read_bytes() for name, target in targets.items()}


def needs_of(library: bytes) -> set[str]:
    """Return the libraries that a library is linked with: DT_NEEDED of a 64-bit ELF file."""
    at, size, n = struct.unpack_from("<Q14xHH", library, 32)
    headers = [struct.unpack_from("<I4xQQ8xQ", library, at + i * size) for i in range(n)]
    dynamic = next(library[offset:offset + size] for kind, offset, _, size in headers if kind == PT_DYNAMIC)
    entries = list(struct.iter_unpack("<QQ", dynamic))
    address = next(value for tag, value in entries if tag == DT_STRTAB)
    names = next(offset + address - start for kind, offset, start, size in headers
                 if kind == PT_LOAD and start <= address < start + size)
    return {library[names + value:library.index(b"\0", names + value)].decode() for tag, value in entries
            if tag == DT_NEEDED}


def tag_of(libraries: Collection[bytes]) -> str:
    """Return the tag for the newest version of the C library that they need, if they need no other library."""
    versions = [int(it) for library in libraries for it in re.findall(rb"\0GLIBC_2\.(\d+)", library)]
    portable = versions and all(it.split(".")[0] in C_LIBRARY for library in libraries for it in needs_of(library))
    return f"py3-none-{f'manylinux_2_{max(versions)}' if portable else 'linux'}_{platform.machine()}"


def _version() -> str:
    found = re.search(r"version : '([^']+)'", (ROOT / "meson.build").read_text())
    assert found
    return found[1]


def _line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def write_wheel(path: Path, files: dict[str, bytes], info: str) -> None:
    """Write files by name, and their list. Dates are constant, so that the same files make the same wheel."""
    record = "".join(_line(name, data) for name, data in files.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            wheel.writestr(entry, data)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    version = _version()
    info = Path(metadata_directory, f"kvd-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(version=version))
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return info.name


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    version = _version()
    info = f"kvd-{version}.dist-info"
    if config_settings and all(it in config_settings for it in LIBRARIES):
        libraries = {f"{name}.0": Path(config_settings[it]).read_bytes() for it, (_, name) in LIBRARIES.items()}
    else:
        # In ROOT, like the shared build folder: objects are reused only if the relative path to the sources is the
        # same.
        with tempfile.TemporaryDirectory(prefix="build-wheel-", dir=ROOT) as build:
            libraries = build_libraries(Path(build), (config_settings or {}).get("cuda", "disabled"))
    tag = tag_of(libraries.values())
    sources = sorted(it for it in (HERE / "kvd").rglob("*") if it.suffix == ".py" or it.name == "py.typed")
    files = {it.relative_to(HERE).as_posix(): it.read_bytes() for it in sources}
    files |= {f"kvd/{library}": data for library, data in libraries.items()}
    files |= {f"{info}/METADATA": METADATA.format(version=version).encode(),
              f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: kvd\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
              f"{info}/entry_points.txt": ENTRY_POINTS.encode(),
              f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes()}
    name = f"kvd-{version}-{tag}.whl"
    write_wheel(Path(wheel_directory, name), files, info)
    return name


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return the build tools that are missing on this machine."""
    return [it for it, program in (("meson>=1.0.1", "meson"), ("ninja", "ninja")) if not shutil.which(program)]


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    raise RuntimeError("libkvd's source is outside this folder: build a wheel instead (pip wheel client/python)")
