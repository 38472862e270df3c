#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Names of clients: $KVD_NAME, the script or module of a Python program, the program.
. "$(dirname "$0")/lib.sh"
: "${LIBKVD:?the library}"
command -v python3 >/dev/null 2>&1 || exit 77
start_daemon

cat >"$dir/serve_llama.py" <<'EOS'
import ctypes, os, subprocess, sys
handle = ctypes.c_void_p()
assert ctypes.CDLL(os.environ["LIBKVD"]).kvd_open(None, ctypes.byref(handle)) == 0
print(subprocess.run([os.environ["KVCTL"], "clients"], capture_output=True, text=True, check=True).stdout)
EOS
# called NAME COMMAND...: a client that lists all clients, itself included, must have that name
called() {
        name=$1
        shift
        what="$*"
        LIBKVD="$LIBKVD" KVCTL="$KVCTL" "$@" >"$dir/out" 2>"$dir/err" || wrong "$what"
        says "[0-9]  $name  *yes "
}
called serve_llama.py python3 "$dir/serve_llama.py" --port 1
called serve_llama.py python3 -u -X dev -W ignore "$dir/serve_llama.py"
called serve_llama env PYTHONPATH="$dir" python3 -m serve_llama
called python3 python3 -c "$(cat "$dir/serve_llama.py")"
called python3 python3 - <"$dir/serve_llama.py"
called 'replica 7' env KVD_NAME='replica 7' python3 "$dir/serve_llama.py"
called serve_llama.py env KVD_NAME="$(printf 'a\nkvd: b')" python3 "$dir/serve_llama.py"
called serve_llama.py env KVD_NAME= python3 "$dir/serve_llama.py"
long=$(printf '%080d' 7)
called "$(printf '%063d' 7)" env KVD_NAME="$long" python3 "$dir/serve_llama.py"
KVD_NAME=filler-of-mine start_filler llama
kvctl 0 clients
says "$filler .* filler-of-mine  *yes "
stop_filler
finish
