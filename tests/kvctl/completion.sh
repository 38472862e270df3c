#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# bash, zsh and fish complete after kvctl exactly what it takes: every verb, every flag of a verb, words of flags, and
# spaces.
. "$(dirname "$0")/lib.sh"
start_daemon
start_filler llama
PATH="$(dirname "$KVCTL"):$PATH"

for shell in bash zsh fish; do
        kvctl 0 completion $shell
        cp "$dir/out" "$dir/completion.$shell"
done
kvctl 2 completion tcsh
complains 'no completion for "tcsh"'

in_bash() {
        bash -c '. "$1"; shift; COMP_WORDS=(kvctl "$@"); COMP_CWORD=$#; _kvctl; printf "%s\n" "${COMPREPLY[@]}"' \
                bash "$dir/completion.bash" "$@"
}

# zsh's completion system needs a terminal: these functions replace it
in_zsh() {
        zsh -f -c 'compdef() { :; }; _files() { :; }
                   _describe() { print -rl -- ${${(P)2}%%:*}; }
                   compadd() { shift; print -rl -- "$@"; }
                   . "$1"; shift; words=(kvctl "$@"); CURRENT=$#words; _kvctl' zsh "$dir/completion.zsh" "$@" |
                grep -- "^$(for last; do :; done; echo "$last")"
}

in_fish() {
        fish --no-config -c 'source $argv[1]; complete -C "kvctl $argv[2..]"' "$dir/completion.fish" "$@" | cut -f 1
}

# offers SHELL WANTED... -- WORD...: exactly these, in any order
offers() {
        shell=$1 wanted=
        shift
        while [ "$1" != -- ]; do
                wanted="$wanted$1
"
                shift
        done
        shift
        "in_$shell" "$@" | sort >"$dir/out"
        printf %s "$wanted" | sort | cmp -s - "$dir/out" || wrong "$shell: kvctl $*: not $wanted"
}

first=$("$KVCTL" --help | sed -n 's/^  \([a-z]*\)\( [a-z]*\)\{0,1\}  .*/\1/p' | sort -u)
for shell in bash zsh fish; do
        command -v $shell >/dev/null || {
                echo "$shell is not installed: its completion is not tried"
                continue
        }
        # shellcheck disable=SC2086 # words
        offers $shell $first -- ''
        offers $shell status stat -- stat
        offers $shell create set delete -- space ''
        offers $shell f32 f16 -- space create --dtype f
        offers $shell i8 -- space create --dtype i
        offers $shell --rows -- --socket "$KVD_SOCKET" blocks --r
        offers $shell --rows -- blocks --r
        offers $shell llama -- blocks l
        offers $shell llama -- space set ll
        "$KVCTL" --help | sed -n 's/^  \([a-z][a-z ]*[a-z]\)  .*/\1/p' >"$dir/verbs"
        while read -r verb; do
                # shellcheck disable=SC2046,SC2086 # words
                offers $shell $("$KVCTL" $verb --help | grep -oE '^ {1,7}(-[a-zA-Z], )?--[a-z-]+' | grep -oE -- '--[a-z-]+') -- $verb --
        done <"$dir/verbs"
done
finish
