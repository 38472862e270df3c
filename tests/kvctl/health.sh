#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kvctl health in every state of the daemon that a probe can meet. What it says of a pool without memory, and of a tier
# that is off, is in test-degraded.c.
. "$(dirname "$0")/lib.sh"

# not started yet
kvctl 3 health
complains "no daemon at $KVD_SOCKET"
kvctl 3 health --alive

start_daemon
kvctl 0 health
says "^ready: kvd [0-9.]* (pid $daemon) at $KVD_SOCKET"
[ "$(wc -l <"$dir/out")" -eq 1 ] || wrong "$what: one line"
kvctl 0 health --alive
says "^ready: kvd "
kvctl 0 health --json
says '"ready": true' "\"pid\": $daemon" '"degraded": "'

# it works with less, and says so
kill "$daemon"
wait "$daemon"
printf '[daemon]\npool = 64M\n' >"$dir/kvd.conf"
start_daemon --config "$dir/kvd.conf" --set daemon.loop=epoll
kvctl 0 health
says_not degraded
echo 'nonsense' >>"$dir/kvd.conf"
kill -HUP "$daemon"
for _ in $(seq 6000); do
        "$KVCTL" health >"$dir/out" 2>"$dir/err"
        ! grep -q degraded "$dir/out" || break
        sleep 0.1
done
kvctl 0 health
says '^ready: .*; degraded: reload$'

# it hangs: the kernel still accepts the connection
kill -STOP "$daemon"
kvctl 3 health
complains 'answer'
kill -CONT "$daemon"
kvctl 0 health

# killed: the socket is there, and nobody listens
kill -KILL "$daemon"
wait "$daemon" 2>/dev/null
[ -S "$KVD_SOCKET" ] || wrong 'the socket stays'
kvctl 3 health
complains "no daemon at $KVD_SOCKET"

# a user who may not connect
start_daemon
if [ "$(id -u)" -eq 0 ] && command -v setpriv >/dev/null; then
        chmod 711 "$dir"
        setpriv --reuid 4002 --regid 4002 --clear-groups "$KVCTL" health >"$dir/out" 2>"$dir/err"
        [ $? -eq 3 ] || wrong 'a user who may not connect'
fi

# ended
kill "$daemon"
wait "$daemon"
kvctl 3 health
daemon=
finish
