#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every program and verb that prints fails if its output cannot be written.
. "$(dirname "$0")/lib.sh"
start_daemon
start_filler llama

full() {
        what=$*
        "$@" >/dev/full 2>"$dir/err"
        got=$?
        : >"$dir/out"
        [ $got -ne 0 ] && [ $got -lt 126 ] || wrong "$what >/dev/full: exit status $got"
        complains 'cannot write: No space left on device'
}
for verb in $("$KVCTL" --help | sed -n 's/^  \([a-z]*\)  .*/\1/p'); do
        full "$KVCTL" "$verb" --help
done
for verb in status ping health spaces clients domain blocks prefixes stat methods metrics check dump proto trace --help --version doctor \
        'top --batch -n 1' 'status --json' 'stat --watch 0.1' 'completion bash' \
        'metrics --listen 127.0.0.1:0' 'space create full --layers 1 --kv-heads 1 --head-dim 8 --vocab 10 --dtype f32'; do
        # shellcheck disable=SC2086 # words
        full "$KVCTL" $verb
done
full "$KVD" --print-config
full "$KVD" --help
full "$KVD" --version
full "$KVLM" --help
full "$KVLM" --version
stop_filler
finish
