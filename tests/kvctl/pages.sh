#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The manual pages render without warnings, and match the programs. ROOT is the source tree.
. "$(dirname "$0")/lib.sh"
: "${ROOT:?source tree}" "${KVLM:?binary of kvlm}"
pages="$ROOT/tools/man"
: >"$dir/err"

# same WHAT FILE FILE: the same words on both sides
same() {
        sort -u "$2" >"$2.sorted"
        sort -u "$3" >"$3.sorted"
        diff "$2.sorted" "$3.sorted" >"$dir/out" || wrong "$1: < only in the program, > only in the page"
        [ -s "$2" ] || wrong "$1: nothing to compare"
}

# Long flags at the start of a line or after a short one.
flags_of_help() {
        "$@" 2>/dev/null | grep -oE '^ *(-[a-zA-Z], )?--[a-z-]+' | grep -oE -- '--[a-z-]+'
        "$@" 2>/dev/null | grep -oE '^  --[a-z-]+, --[a-z-]+' | grep -oE -- '--[a-z-]+'
}

flags_of_page() {
        sed -n 's/^\.It //p' "$1" | grep -oE -- '(Fl |, )-[a-z-]+' | sed -E 's/(Fl |, )-/--/'
}

for renderer in mandoc groff man; do
        command -v $renderer >/dev/null 2>&1 || {
                echo "skipped: there is no $renderer"
                exit 77
        }
done
for page in "$pages"/*.[1-9]; do
        mandoc -Tlint -Wwarning "$page" >"$dir/out" 2>&1 || wrong "$page: mandoc has warnings"
        groff -mandoc -ww -z -Tutf8 "$page" >"$dir/out" 2>&1 || wrong "$page: groff fails"
        [ ! -s "$dir/out" ] || wrong "$page: groff has warnings"
        man -l -Tascii "$page" >"$dir/out" 2>"$dir/err" || wrong "$page: man fails"
        [ ! -s "$dir/err" ] || wrong "$page: man has warnings"
        : >"$dir/err"
done

# kvctl(1): verbs, flags, counters, invariants
"$KVCTL" --help | sed -n 's/^  \([a-z][a-z ]*[a-z]\)  .*/\1/p' >"$dir/verbs"
sed -n 's/^\.It Ic //p' "$pages/kvctl.1" | sed -E 's/ (Op|Oo|Ar|Fl|Brq).*//' >"$dir/page-verbs"
same 'verbs of kvctl(1)' "$dir/verbs" "$dir/page-verbs"
{
        flags_of_help "$KVCTL" --help
        while read -r verb; do
                # shellcheck disable=SC2086 # words
                flags_of_help "$KVCTL" $verb --help
        done <"$dir/verbs"
} >"$dir/flags"
grep -oE 'Fl ([no] , )?-[a-z]+(-[a-z]+)*' "$pages/kvctl.1" | sed -E 's/Fl ([no] , )?-/--/' >"$dir/page-flags"
grep -oE 'Fl [hVwno] , -[a-z]+' "$pages/kvctl.1" | sed 's/.*, -/--/' >>"$dir/page-flags"
same 'flags of kvctl(1)' "$dir/flags" "$dir/page-flags"
{
        sed -n 's/^KVD_COUNTER(\([A-Z_]*\),.*/\1/p' "$ROOT/ipc/base/counters.def" | tr A-Z a-z
        sed -n 's/^ *\[KVD_CLIENT_[A-Z_]*\] = {"\([A-Z_]*\)".*/\1/p' "$ROOT/tools/kvctl/stat.c" | tr A-Z a-z
        tr -s '\n ' ' ' <"$ROOT/tools/kvctl/stat.c" | grep -oE 'fill_figure\( ?t, space, "[a-z_]+"' | sed 's/.*"\(.*\)"/\1/'
} >"$dir/counters"
sed -n '/^\.Sh COUNTERS/,/^\.Sh DEGRADED/s/^\.It Va //p' "$pages/kvctl.1" >"$dir/page-counters"
same 'counters of kvctl(1)' "$dir/counters" "$dir/page-counters"
# names and descriptions of degraded states, word for word
cat "$ROOT/ipc/base/degraded.def" | tr '\n' ' ' | sed 's/KVD_DEGRADED(/\n/g' |
        sed -n 's/^[A-Z]*, \([a-z_]*\), "\([a-z]*\)", *"\([^"]*\)".*/\1: \3 (\2)./p' | sed 's/ ()\.$/./' >"$dir/states"
sed -n '/^\.Sh DEGRADED/,/^\.Sh TOP/p' "$pages/kvctl.1" | sed -n '/^\.It Va /{s/^\.It Va //;N;s/\n/: /;p;}' >"$dir/page-states"
same 'degraded states of kvctl(1)' "$dir/states" "$dir/page-states"
grep -oE -h '"[SBQGF][0-9]+[ "]' "$ROOT"/store/check/*.c | tr -d '" ' >"$dir/invariants"
sed -n 's/^\.It \([SBQGF][0-9]*\)$/\1/p' "$pages/kvctl.1" >"$dir/page-invariants"
same 'invariants of kvctl(1)' "$dir/invariants" "$dir/page-invariants"

# kvd.conf(5), kvd(8), kvlm(1): options
"$KVD" --print-config | sed -n 's/^#\([a-z_]*\) =.*/\1/p' >"$dir/options"
sed -n 's/^\.It Cm //p' "$pages/kvd.conf.5" >"$dir/page-options"
same 'options of kvd.conf(5)' "$dir/options" "$dir/page-options"
# defaults of these options, in one sentence each
"$KVD" --print-config | sed -n 's/^#\([a-z_]*\) = \(.*\)/\1 \2/p' | while read -r name value; do
        sed -n "/^\\.It Cm $name\$/,/^\\.It /p" "$pages/kvd.conf.5" | sed '$d' | tr '\n' ' ' |
                grep -qF -e "Default: $value" -e "Default: .Pa $value" || echo "$name: $value"
done >"$dir/out"
[ ! -s "$dir/out" ] || wrong 'defaults of kvd.conf(5)'
flags_of_help "$KVD" --help >"$dir/kvd"
flags_of_page "$pages/kvd.8" >"$dir/page-kvd"
same 'options of kvd(8)' "$dir/kvd" "$dir/page-kvd"
flags_of_help "$KVLM" --help >"$dir/kvlm"
flags_of_page "$pages/kvlm.1" >"$dir/page-kvlm"
same 'options of kvlm(1)' "$dir/kvlm" "$dir/page-kvlm"

# libkvd(3) and related pages (their examples are run by tests/tree/pasted)
python3 "$here/prototypes.py" "$ROOT" >"$dir/out" || wrong 'libkvd(3) and its sisters: calls and errors'

# Every column that a table shows is in the page.
start_daemon
start_filler llama
for verb in spaces clients 'prefixes llama' 'stat llama' check 'blocks llama' 'top -n 1 --watch 0.1' proto; do
        # shellcheck disable=SC2086 # words
        "$KVCTL" $verb | grep -E '^ *[A-Z][A-Z/s ]+$' | grep -oE '\b[A-Z]{2,}(/s)?\b' | sort -u | while read -r word; do
                grep -qF "$word" "$pages/kvctl.1" || echo "$verb: $word"
        done
done >"$dir/out"
[ ! -s "$dir/out" ] || wrong 'columns that are not in kvctl(1)'
finish
