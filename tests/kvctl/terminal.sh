#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# On a terminal: colours, width, --watch on the alternate screen, and the terminal restored.
. "$(dirname "$0")/lib.sh"
: "${PTY:?binary of tests/kvctl/pty.c}"
export TERM=xterm
escape=$(printf '\033')

# on_terminal STATUS ROWS COLUMNS TEXT ARGUMENT...: types Ctrl-C when TEXT has appeared three times
on_terminal() {
        wanted=$1 rows=$2 columns=$3 text=$4
        shift 4
        what="kvctl $* on a terminal"
        : >"$dir/err"
        "$PTY" "$rows" "$columns" "$text" "$KVCTL" "$@" >"$dir/raw"
        got=$?
        tr -d '\r' <"$dir/raw" >"$dir/out"
        [ $got -eq "$wanted" ] || wrong "$what: exit status $got, not $wanted"
}

start_daemon --set "daemon.file=$dir/file" --set daemon.file_size=16M
start_filler llama

on_terminal 0 40 60 '' blocks
says "$escape\\[0;30;42mssss" "$escape\\[[0-9;]*mP"
sed "s/$escape\\[[0-9;]*m//g" "$dir/out" >"$dir/plain"
[ "$(awk '{ if (length($0) > n) n = length($0) } END { print n }' "$dir/plain")" -le 60 ] || wrong "$what: wraps at 60"
grep -q '^ 48  ' "$dir/plain" || wrong "$what: 48 blocks to a row"

NO_COLOR=1 on_terminal 0 40 60 '' blocks
says_not "$escape"
for term in dumb '' unset; do
        export TERM="$term"
        [ "$term" != unset ] || unset TERM
        for asked in '0 blocks' '0 top -n 2 --watch 0.1' '1 profile build llama' '0 evict llama --blocks 1'; do
                on_terminal ${asked%% *} 40 60 '' ${asked#* }
                says_not "$escape"
        done
        on_terminal 0 40 60 'kvctl blocks, every' blocks --watch 0.1
        says 'Ctrl-C ends'
        says_not "$escape"
done
export TERM=xterm
for size in '0 0' '24 0' '0 80'; do
        on_terminal 0 $size '' top -n 2 --watch 0.1
        says '^pool  ' '^llama '
done
# no colours, but the alternate screen
NO_COLOR=1 on_terminal 0 40 60 'Ctrl-C ends' blocks --watch 0.1
says "^$escape\\[?1049h"
says_not "$escape\\[[0-9;]*m"
# tables fit, and lose no column: columns that do not fit are printed below, after the row's name
for asked in status spaces clients domain tiers prefixes 'stat llama' 'methods llama --settings' 'check llama' doctor proto; do
        for columns in 80 60; do
                # shellcheck disable=SC2086 # words
                "$KVCTL" $asked >"$dir/wide"
                # shellcheck disable=SC2086
                NO_COLOR=1 on_terminal 0 40 $columns '' $asked
                fits $columns
                for title in $(grep -E '^[A-Z][A-Z/ ]+$' "$dir/wide"); do
                        grep -q -- "$title" "$dir/out" || wrong "$what: no $title at $columns columns"
                done
        done
done
# sentences fit, too, wherever they are broken; a pool larger than the machine makes a long one
"$KVD" --private "$dir/large" --pool 16T 2>/dev/null &
large=$!
until "$KVCTL" --socket "$dir/large/kvd.sock" ping >"$dir/out" 2>&1; do sleep 0.1; done
for columns in $(seq 48 62); do
        NO_COLOR=1 on_terminal 0 40 "$columns" '' --socket "$dir/large/kvd.sock" status
        says 'degraded: memory_limit'
        fits "$columns"
done
kill "$large"
NO_COLOR=1 on_terminal 0 40 80 '' tiers
says '^TIER  STATE ' '^TIER  WRITTEN ' '^file  on '

# a screen that is too small reports how much it leaves out
for n in $(seq 31); do
        "$KVCTL" space create "space-$n" --layers 1 --kv-heads 1 --head-dim 8 --dtype f32 --vocab 9 --max-blocks 16 >/dev/null
done
NO_COLOR=1 on_terminal 0 24 80 ' more lines' top --watch 0.1
says '^[0-9]* more lines (of 32 spaces and 2 clients): scroll down, or enlarge the terminal'
NO_COLOR=1 on_terminal 0 24 80 ' more lines' spaces --watch 0.1
says '^[0-9]* more lines: enlarge the terminal'
NO_COLOR=1 on_terminal 0 90 80 'kvctl top, every' top --watch 0.1
says_not ' more lines'
for n in $(seq 31); do
        "$KVCTL" space delete "space-$n" >/dev/null
done

# Ctrl-C: leaves the alternate screen, shows the cursor, prints nothing after that, and exits with status 0
on_terminal 0 30 80 'Ctrl-C ends' blocks --watch 0.1
says "^$escape\\[?1049h$escape\\[?25l" 'Ctrl-C ends'
[ "$(tail -c 14 "$dir/out")" = "$escape[?25h$escape[?1049l" ] || wrong "$what: does not give the terminal back"
on_terminal 0 10 80 'kvctl top, every' top --watch 0.1
[ "$(tail -c 14 "$dir/out")" = "$escape[?25h$escape[?1049l" ] || wrong "$what: does not give the terminal back"
most=$(awk '/\[2J/ { n = 0 } ++n > m { m = n } END { print m }' "$dir/out")
[ "$most" -le 10 ] || wrong "$what: a picture is larger than the screen"

# top at a keyboard
NO_COLOR='' python3 "$here/top.py" "$KVCTL" || wrong 'kvctl top at a keyboard: see above'

# JSON stays one document, whatever ends it
on_terminal 0 30 80 '"figures"' stat --watch 0.1 --json
sed -i 's/^^C//; s/^\(.*\)^C/\1/' "$dir/out"
json_is_valid
says '"samples": \['
"$KVCTL" clients --watch 0.1 --json >"$dir/out" 2>"$dir/err" &
pid=$!
wait_until '"age_ms"'
kill -INT $pid
wait $pid || wrong 'SIGINT ends a watch in order'
json_is_valid

# A restarted daemon is found again. (Descriptor 8 keeps the filler running.)
what='kvctl status --watch while the daemon restarts'
"$PTY" 30 80 '' "$KVCTL" status --watch 0.1 >"$dir/out" 8>&- &
pid=$!
wait_until "^pid  *$daemon"
: >"$dir/top"
"$PTY" 24 80 '' "$KVCTL" top --watch 1 >"$dir/top" 8>&- &
top=$!
top_shows() {
        for _ in $(seq 600); do
                ! grep -q "$1" "$dir/top" || return 0
                sleep 0.1
        done
        wrong "kvctl top while the daemon restarts: no \"$1\""
}
top_shows '^pool  '
stop_filler
began=$(date +%s)
kill "$daemon"
wait "$daemon"
wait_until 'no daemon at '
says 'waiting for it'
top_shows 'waiting for it'
asked=$(grep -c 'waiting for it' "$dir/top")
[ "$asked" -le $((10 * ($(date +%s) - began + 2))) ] || wrong 'kvctl top asks for a daemon that is away again and again'
start_daemon
wait_until "^pid  *$daemon"
kill -USR1 $top
wait $top || wrong 'kvctl top while the daemon restarts: ends in order'
kill -USR1 $pid
wait $pid || wrong "$what: ends in order"
finish
