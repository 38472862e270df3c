#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks the models of this directory: the protocol as designed is correct, and no part of it can be left out.
#
#   run.sh [PATTERN]     only variants whose "model macros" contain PATTERN
#
# holds: no error, the whole state space was searched, and every line of the model was reached
# lives: the model's liveness claim holds under weak fairness
# wrong: a mutant; an assertion must fail
# hangs: a mutant; the liveness claim must fail
set -u
here=$(cd "$(dirname "$0")" && pwd)
for tool in spin gcc; do
        command -v $tool >/dev/null || { echo "SKIP: $tool is not installed"; exit 77; }
done
tmp=$(mktemp -d) && [ -n "$tmp" ] || exit 1
trap 'rm -rf "$tmp"' EXIT

variants() {
        grep -F -- "${1-}" <<'END'
holds leaf    DEPTH=3 OPS=5
holds pins
lives pins    LOOKUPS=1 LASTGEN=2
holds leaf    RUNS OPS=5
lives leaf    OPS=3
lives lease
holds lease
holds pins    THREADS
holds restart
lives restart
holds fill
lives fill
holds semaphore
lives semaphore
holds shards
lives shards
holds outlive
lives outlive
holds post
lives post
wrong pins    NO_CFENCE
wrong pins    NO_DFENCE
wrong pins    NO_RECHECK
wrong pins    NO_GEN
wrong pins    NO_SCAN
wrong pins    REAP_AT_EOF
wrong pins    TOKENS_FIRST
wrong pins    GROUP_LATE
wrong pins    THREADS PIN_IS_FLAG
wrong pins    THREADS PIN_NOT_ATOMIC
hangs pins    NEVER_REAP
wrong leaf    PARENT_FIRST
wrong leaf    LINK_NO_GEN
wrong leaf    NO_LINK
wrong leaf    NO_RECHECK
wrong leaf    NO_CFENCE
wrong leaf    NO_DFENCE
wrong leaf    GO_ON OPS=3
wrong leaf    NO_SCAN_ABOVE
wrong leaf    LATE_PARENT
wrong leaf    RUNS NO_RECHECK
wrong leaf    RUNS RUN_READ_ONCE
wrong leaf    RUNS RUN_WRITTEN_OPEN
wrong leaf    RUNS RUN_NO_GEN
wrong restart NO_EPOCH
wrong restart LATE_EPOCH
wrong restart FORGET_PAGES
wrong restart TAKE_UNSEALED
wrong restart DROP_RETIRING
wrong fill    FREE_AT_EOF
wrong fill    SEAL_ANY
wrong fill    SEAL_EARLY
hangs fill    NEVER_DISCARD
wrong semaphore SEAL_FIRST
wrong semaphore CLEAR_EARLY
wrong semaphore NO_QUARANTINE
wrong semaphore NO_POISON
wrong semaphore RELEASE_FIRST
wrong semaphore NO_WAIT
wrong semaphore NO_CHECK
wrong semaphore CHECK_FIRST
wrong semaphore EVICT_PENDING
wrong semaphore UNPIN_EARLY
hangs semaphore NO_RELEASE
hangs semaphore ROW_EARLY
wrong shards  WAIT_FOR_ONE
wrong shards  ARRIVE_EARLY
wrong shards  NO_POISON
wrong shards  RELEASE_FIRST
wrong shards  NO_CHECK
hangs shards  NO_RELEASE
hangs shards  SEAL_ENDED
wrong lease   NO_WAIT
hangs lease   LEASE_OUTLIVES_HOLDER
hangs lease   NO_DEADLINE
hangs lease   NO_WAKE
wrong outlive TAKE_ALL
wrong outlive PLAIN_RELEASE
wrong outlive END_EARLY
wrong outlive NO_LIMBO
wrong outlive NO_MARK
hangs outlive NO_END
hangs post    NO_R4
hangs post    NO_R5
hangs post    NO_R7
hangs post    STAY_TOLD
END
}

# Mutants fail early, so a quick compilation matters more to them than a quick search. They run with -E, which ignores
# deadlocks: a mutant must fail for the reason that it was made for.
build_and_search() {            # kind, model file, -DMACRO ...
        local cflags search
        case $1 in
        holds) cflags="-O2 -DSAFETY -DNOCLAIM" search="" ;;
        wrong) cflags="-O0 -DSAFETY -DNOCLAIM" search="-E" ;;
        lives) cflags="-O2 -DNFAIR=4" search="-a -f" ;;
        hangs) cflags="-O0 -DNFAIR=4" search="-a -f" ;;
        esac
        # shellcheck disable=SC2086     # both are several words
        spin -a "${@:3}" "$2" && gcc -w $cflags -DCOLLAPSE -o pan pan.c && ./pan -m100000 $search
}

searched_all() {
        grep -q 'errors: 0$' log &&
        ! grep -qE 'max search depth too small|out of memory|Search not completed|hash table full' log
}

# pan lists per process the statements that it never executed; the claim and the end of an endless loop do not count
reached_all() {
        ! sed '/^unreached in claim/,$d' log | grep '^[[:space:]].*, state ' | grep -qv '"-end-"'
}

check() {                       # kind, model, MACRO ...
        local kind=$1 model=$2 verdict=ok defs=("${@:3}") states seconds
        defs=("${defs[@]/#/-D}")
        mkdir "$tmp/$n" && cd "$tmp/$n" || exit 1
        build_and_search "$kind" "$here/$model.pml" "${defs[@]}" >log 2>&1
        case $kind in
        holds) searched_all && reached_all || verdict=FAIL ;;
        lives) searched_all || verdict=FAIL ;;
        wrong) grep -q 'assertion violated' log || verdict=FAIL ;;
        hangs) grep -q 'acceptance cycle (' log || verdict=FAIL ;;
        esac
        states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' log)
        seconds=$(sed -n 's/^pan: elapsed time \([0-9.e+-]*\) seconds/\1/p' log)
        printf '%-4s %s %-9s %-22s %8s states %5s s\n' \
                $verdict "$kind" "$model" "${*:3}" "${states:--}" "${seconds:--}"
        if [ $verdict != ok ]; then
                tail -n 40 log
                [ ! -f "$model.pml.trail" ] ||
                        spin -p -k "$model.pml.trail" "${defs[@]}" "$here/$model.pml" | tail -n 60
        fi >&2
        echo $verdict >verdict
        rm -f pan pan.*
}

n=0
while read -r -a variant; do
        while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
        n=$((n + 1))
        check "${variant[@]}" &
done < <(variants "$@")
wait

passed=$(cat "$tmp"/*/verdict 2>/dev/null | grep -c '^ok$')
failed=$((n - passed))
echo "$passed passed, $failed failed"
[ $n -gt 0 ] && [ $failed -eq 0 ]
