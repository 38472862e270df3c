# SPDX-License-Identifier: Apache-2.0
#
# For the end-to-end tests: the test's own daemon, a client that fills it, and expectations. Meson sets KVD, KVCTL and
# FILLER to the binaries. A test is a file that begins with
#
#       . "$(dirname "$0")/lib.sh"
#       start_daemon; start_filler llama
#
# and ends with "finish". A failed expectation is reported and the test continues, so that one run shows all failures.
set -u
: "${KVD:?binary of the daemon}" "${KVCTL:?binary of kvctl}" "${FILLER:?binary of tests/kvctl/filler.c}"
export LC_ALL=C NO_COLOR=
unset COLUMNS LINES

dir=$(mktemp -d "${TMPDIR:-/tmp}/kvctl.XXXXXX") || exit 1
export KVD_SOCKET="$dir/kvd.sock"
failed=0
daemon=
here=$(cd "$(dirname "$0")" && pwd)

stop_all() {
        exec 8>&- # ends the filler
        [ -z "$daemon" ] || kill "$daemon" 2>/dev/null
        wait
        rm -rf "$dir"
}
trap stop_all EXIT

start_daemon() {
        mkfifo "$dir/ready"
        "$KVD" --private "$dir" --pool 64M --set daemon.segment=1M --ready-fd 9 "$@" 9>"$dir/ready" 2>"$dir/kvd.log" &
        daemon=$!
        read -r _ <"$dir/ready" || {
                if ! kill -0 "$daemon" 2>/dev/null; then
                        echo "kvd did not start:"
                        cat "$dir/kvd.log"
                        exit 1
                fi
        }
        rm "$dir/ready"
}

# The filler's standard input is descriptor 8, so that it ends with this test.
start_filler() {
        mkfifo "$dir/hold" "$dir/filled"
        "${2:-$FILLER}" "$1" <"$dir/hold" >"$dir/filled" &
        filler=$!
        exec 8>"$dir/hold"
        read -r word <"$dir/filled"
        rm "$dir/hold" "$dir/filled"
        [ "${word:-}" = ready ] || {
                echo "the filler did not get ready"
                exit 1
        }
}

stop_filler() {
        exec 8>&-
        wait "$filler"
}

# A process stops once it is scheduled, which takes a moment on a busy machine.
pause_filler() {
        kill -STOP "$filler"
        until grep -q ') T ' "/proc/$filler/stat"; do
                sleep 0.01
        done
}

wrong() {
        echo "FAILED: $*"
        echo "  stdout: $(head -c 2000 "$dir/out")"
        echo "  stderr: $(head -c 2000 "$dir/err")"
        failed=1
}

# kvctl STATUS ARGUMENT...: runs it; output is in $dir/out and $dir/err
kvctl() {
        wanted=$1
        shift
        what="kvctl $*"
        "$KVCTL" "$@" >"$dir/out" 2>"$dir/err"
        got=$?
        [ $got -eq "$wanted" ] || wrong "$what: exit status $got, not $wanted"
        if [ $got -ge 2 ] || [ -s "$dir/err" ]; then
                [ "$(wc -l <"$dir/err")" -eq 1 ] && grep -q '^kvctl: ' "$dir/err" ||
                        wrong "$what: an error is one line that begins with \"kvctl: \""
        fi
}

# says PATTERN...: each occurs in the output (basic regular expressions)
says() {
        for pattern in "$@"; do
                grep -q -- "$pattern" "$dir/out" || wrong "$what: no \"$pattern\" in its output"
        done
}

says_not() {
        for pattern in "$@"; do
                ! grep -q -- "$pattern" "$dir/out" || wrong "$what: \"$pattern\" is in its output"
        done
}

complains() {
        for pattern in "$@"; do
                grep -q -- "$pattern" "$dir/err" || wrong "$what: no \"$pattern\" in its complaint"
        done
}

# wait_until PATTERN: waits up to a minute for PATTERN in the output of a command that is still running
wait_until() {
        for _ in $(seq 600); do
                ! grep -q -- "$1" "$dir/out" || return 0
                sleep 0.1
        done
        wrong "$what: \"$1\" did not come"
}

# The output is one valid JSON document (checked only if there is a python3).
json_is_valid() {
        if command -v python3 >/dev/null 2>&1; then
                python3 -m json.tool <"$dir/out" >"$dir/json" 2>&1 || wrong "$what: not JSON: $(cat "$dir/json")"
        fi
}

fits() {
        widest=$(awk '{ if (length($0) > n) n = length($0) } END { print n + 0 }' "$dir/out")
        [ "$widest" -le "$1" ] || wrong "$what: $widest columns wide, not $1"
}

finish() {
        exit $failed
}
