#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every error is one line that says what to do, with the right exit status.
. "$(dirname "$0")/lib.sh"

# no daemon
kvctl 3 status
complains "no daemon at $KVD_SOCKET" 'systemctl start' -- --socket
kvctl 3 ping --json
kvctl 3 --socket "$dir/elsewhere" check
complains elsewhere
kvctl 3 --socket /dev/null status
kvctl 3 --socket "$(printf '/%0200d' 0)" status
kvctl 3 top -n 1
kvctl 0 proto # needs none
kvctl 0 --help
fits 80
kvctl 0 --version
says '^kvctl [0-9]'

# A program with more rights than the user that starts it takes no socket from that user's environment.
cp "$KVCTL" "$dir/setuid"
chmod 711 "$dir"
chmod 755 "$dir/setuid"
if [ "$(id -u)" -ne 0 ] || grep -q '^NoNewPrivs:.*1' /proc/self/status || findmnt -nT "$dir" -o OPTIONS | grep -q nosuid
then
        echo 'not run: a set-uid program needs root, and a folder where it works'
else
        setpriv --reuid 4002 --regid 4002 --clear-groups "$dir/setuid" ping 2>"$dir/err"
        complains "$KVD_SOCKET"
        chown 4001 "$dir/setuid"
        chmod 4755 "$dir/setuid"
        setpriv --reuid 4002 --regid 4002 --clear-groups "$dir/setuid" ping >"$dir/out" 2>"$dir/err"
        ! grep -q "$KVD_SOCKET" "$dir/err" || wrong 'a set-uid program takes the socket from the environment'
        grep -q . "$dir/out" "$dir/err" || wrong 'a set-uid program does not run'
fi
chmod 700 "$dir"

# usage
"$KVCTL" >"$dir/out" 2>"$dir/err"
[ $? -eq 2 ] && grep -q '^usage: ' "$dir/err" && [ ! -s "$dir/out" ] || wrong 'kvctl alone shows its help'
kvctl 2 stauts
complains 'did you mean "status"'
kvctl 2 space creat x
complains 'did you mean "space create"'
kvctl 2 blocks --row 3
complains 'did you mean --rows'
kvctl 2 blocks --limit 3
kvctl 2 evict --blocks
kvctl 2 blocks a b
kvctl 2 space create x
complains -- '--layers'
for verb in $("$KVCTL" --help | sed -n 's/^  \([a-z]*\)  .*/\1/p') 'space create' 'space set' 'space delete'; do
        # shellcheck disable=SC2086 # words
        kvctl 0 $verb --help
        says '^usage: kvctl ' '^example: kvctl '
        sed -i '/^example: /d' "$dir/out" # can be pasted
        fits 80
done
kvctl 0 space --help
says '^usage: kvctl space VERB' '^  space create  ' '^  space delete  '
says_not 'profile'
kvctl 0 --help profile
says '^  profile build  '

# what newcomers type
for program in "$KVD" "$KVCTL" "$KVLM"; do
        what="$program"
        "$program" -h >"$dir/out" 2>"$dir/err" || wrong "$what -h: exit status $?"
        "$program" --help | cmp -s - "$dir/out" || wrong "$what: -h is not --help"
        fits 80
        "$program" -V >"$dir/out" 2>"$dir/err" || wrong "$what -V: exit status $?"
        "$program" --version | cmp -s - "$dir/out" || wrong "$what: -V is not --version"
done
for asked in '' blocks 'space create' space 'client end' top; do
        # shellcheck disable=SC2086 # words
        "$KVCTL" $asked --help >"$dir/help"
        kvctl 0 help $asked
        cmp -s "$dir/help" "$dir/out" || wrong "kvctl help $asked is not kvctl $asked --help"
done
kvctl 2 help blcks
complains 'did you mean "blocks"'
kvctl 2 space
complains '"space" wants another word; "kvctl space --help" lists them'

start_daemon
kvctl 2 evict
complains -- '--all'
kvctl 1 blocks
complains 'no space yet'
kvctl 1 blocks nix
complains 'no space "nix"'
shape='--layers 2 --kv-heads 2 --head-dim 8 --vocab 1000'
# shellcheck disable=SC2086 # words
{
        kvctl 2 space create x $shape --dtype bf17
        complains 'f32|f16|bf16|i8|q8|q4'
        kvctl 2 space create x $shape --dtype f16 --layers 70000
        complains 65535
        kvctl 2 space create x $shape --dtype f16 --max-blocks 5000000000
        kvctl 2 space create x $shape --dtype f16 --fingerprint xyz
        kvctl 2 space create "$(printf '%070d' 0)" $shape --dtype f16
        kvctl 1 space create 'a b' $shape --dtype f16
        kvctl 1 space create x $shape --dtype f16 --layer-groups 3
        kvctl 0 space create one $shape --dtype f16
        kvctl 0 space create two $shape --dtype f16
}
kvctl 2 blocks
complains '2 spaces' 'kvctl blocks one'
kvctl 1 prefixes tow
complains 'did you mean "two"'
kvctl 2 evict one --blocks 1 --all
kvctl 2 evict one --blocks 0
kvctl 2 evict one --chain 12
kvctl 2 evict one --chain 1:2x
kvctl 1 evict one --chain 1:2
kvctl 1 --domain nosuch space delete one
complains nosuch
# a misspelt domain is an error, not a domain without spaces
kvctl 1 --domain nosuch spaces --json
complains 'there is no domain .nosuch.'

# nowhere to write to
"$KVCTL" stat one >/dev/full 2>"$dir/err"
[ $? -eq 1 ] && grep -q '^kvctl: cannot write' "$dir/err" || wrong 'a full disk'

# A client chooses its name, which must not confuse a JSON reader.
name=$(printf 'e"v\\i\344\270\255')
ln -s "$FILLER" "$dir/$name"
start_filler evil "$dir/$name"
kvctl 0 clients
says 'e?v?i'
kvctl 0 clients --json
json_is_valid
says '"name": "e?v?i'
finish
