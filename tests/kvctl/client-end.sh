#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# client end: for a client that lives on, one that is stopped, one that holds nothing, and one that does not exist; then
# their processes end.
. "$(dirname "$0")/lib.sh"
start_daemon

# number_of PID: the client's number; empty if there is none
number_of() {
        "$KVCTL" clients | awk -v pid="$1" '$2 == pid { print $1 }'
}

# all_gone PID: waits until the daemon has seen the process end, and has taken back everything that it held
all_gone() {
        what="after the end of process $1"
        for _ in $(seq 600); do
                [ -n "$(number_of "$1")" ] || break
                sleep 0.1
        done
        [ -z "$(number_of "$1")" ] || wrong "its client is still there"
        kvctl 0 spaces --json
        says '"filling": 0' '"limbo": 0' '"clients": 0'
        kvctl 0 check
        kvctl 0 evict llama --all
        says_not 'in use'
        kvctl 0 spaces --json
        says '"sealed": 0'
}

kvctl 1 client end 77
complains 'no client 77'
kvctl 2 client end
kvctl 2 client end all
complains 'not "all"'
kvctl 2 client end -- -1
kvctl 1 client end 1 --domain nosuch
complains 'no domain'

# the process lives on: its pinned block and all blocks before it stay, and so do those that it was filling
start_filler llama
kvctl 0 evict llama --all
says '; 26 are in use and stay'
number=$(number_of "$filler")
kvctl 0 client end "$number"
says "^Client $number is ended; 432 KiB are kept until process $filler is gone: the blocks that it pins (1), those before" \
        'them, and those that it was filling ([0-9]*)\.$'
kvctl 0 client end "$number" --json
json_is_valid
says "\"pid\": $filler" '"kept_bytes": 442368' '"process_gone": false' '"kept_spaces": 1' '"kept_pinned_blocks": 1'
says_not '"kept_filling_blocks": 0'
kvctl 0 clients
says " $filler .* kvctl-filler  no "
kvctl 0 check
kvctl 1 evict llama --all
says '^Nothing evicted from llama: all 26 blocks'
kill -9 "$filler"
exec 8>&-
all_gone "$filler"

# the process is stopped, and ends without having been continued
start_filler llama
kvctl 0 clients
says_not STOPPED
pause_filler
kvctl 0 clients
says '^CLIENT .* STOPPED ' " $filler .* kvctl-filler  yes  *yes " ' kvctl  *yes  *no '
kvctl 0 top -n 1
says '^CLIENT .* STOPPED ' " $filler .* kvctl-filler  yes "
number=$(number_of "$filler")
kvctl 0 client end "$number"
says "kept until process $filler is gone"
kvctl 0 clients
says_not STOPPED # it is not connected
kvctl 0 check
kill -9 "$filler"
exec 8>&-
all_gone "$filler"

# the process is stopped, and continues: it releases everything as usual
start_filler llama
pause_filler
kvctl 0 client end "$(number_of "$filler")"
kill -CONT "$filler"
stop_filler || wrong "the filler did not end well"
all_gone "$filler"

# the client holds nothing
"$KVCTL" top --batch --watch 0.1 >"$dir/top" 2>"$dir/top.err" &
top=$!
for _ in $(seq 600); do
        [ -z "$(number_of $top)" ] || break
        sleep 0.1
done
number=$(number_of $top)
kvctl 0 client end "$number"
says "^Client $number (process $top) is ended; nothing is kept\\.$"
wait $top
[ -z "$(number_of $top)" ] || wrong "the client is still in the list"
finish
