#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The units parse without a word, are tightly sandboxed, and these checks can fail.
#
#   verify.sh BUILDDIR KVD       BUILDDIR: where the generated units are; KVD: any executable
set -u
export LC_ALL=C
build=$1 kvd=$2
source=$(cd "$(dirname "$0")/../../../systemd" && pwd)
for tool in systemd-analyze systemd-sysusers systemd-tmpfiles; do
        command -v $tool >/dev/null || { echo "SKIP: $tool is not installed"; exit 77; }
done
tmp=$(mktemp -d) && [ -n "$tmp" ] || exit 1
trap 'rm -rf "$tmp"' EXIT

failed=0
check() {                       # "ok" or "not ok", then what was checked
        echo "$1: $2"
        [ "$1" = ok ] || failed=1
}

# verify exits 0 on a key that it does not know: only silence is success
silent() {
        systemd-analyze verify --man=no "$1/kvd@0.service" "$1/kvd@0.socket" "$1/kvd-gpu@0.service" \
                "$1/kvctl-metrics@0.service" "$1/kvctl-events@0.service" >"$tmp/out" 2>&1 &&
        [ ! -s "$tmp/out" ]
}

sandboxed() {
        for unit in kvd kvctl-metrics kvctl-events; do
                systemd-analyze security --no-pager --offline=true --threshold=20 "$1/$unit@0.service" >"$tmp/out" 2>&1 ||
                        return 1
        done
}

units() {                       # a directory of units to edit
        mkdir "$tmp/$1"
        sed "s|^ExecStart=[^ ]*/kvd |ExecStart=$kvd |" "$build/kvd@.service" >"$tmp/$1/kvd@.service"
        for unit in kvctl-metrics kvctl-events; do
                sed "s|^ExecStart=[^ ]*/kvctl |ExecStart=$kvd |" "$build/$unit@.service" >"$tmp/$1/$unit@.service"
        done
        cp "$source/kvd@.socket" "$source/kvd-gpu@.service" "$tmp/$1"
}

units good
if ! grep -n '@[a-z]*@' "$build/kvd@.service" "$build/kvctl-metrics@.service" "$build/kvctl-events@.service"; then check ok "every path is filled in"
else check "not ok" "a path is not filled in"; fi

if silent "$tmp/good"; then check ok "systemd takes the units without a word"
else check "not ok" "systemd complains"; cat "$tmp/out"; fi

if sandboxed "$tmp/good"; then check ok "$(tail -n 1 "$tmp/out")"
else check "not ok" "exposure above 2.0"; cat "$tmp/out"; fi

units unknown_key
sed -i 's/^WatchdogSec=/Watchdog=/' "$tmp/unknown_key/kvd@.service"
if silent "$tmp/unknown_key"; then check "not ok" "a misspelt key goes unnoticed"
else check ok "a misspelt key is noticed"; fi

units open
sed -i '/^Protect/d; /^SystemCall/d; /^CapabilityBoundingSet/d' "$tmp/open/kvd@.service"
if sandboxed "$tmp/open"; then check "not ok" "a missing sandbox goes unnoticed"
else check ok "a missing sandbox is noticed"; fi

# sysusers first: tmpfiles looks the user up. --remove reads every line and has nothing to do.
mkdir -p "$tmp/root/etc"
if systemd-sysusers --dry-run "$source/kvd.sysusers" >"$tmp/out" 2>&1 &&
   systemd-sysusers --root="$tmp/root" "$source/kvd.sysusers" >>"$tmp/out" 2>&1 &&
   grep -q '^kvd:' "$tmp/root/etc/passwd"; then check ok "sysusers makes user kvd"
else check "not ok" "sysusers"; cat "$tmp/out"; fi

if systemd-tmpfiles --remove --root="$tmp/root" "$source/kvd.tmpfiles" >"$tmp/out" 2>&1 &&
   [ ! -s "$tmp/out" ]; then check ok "tmpfiles parses"
else check "not ok" "tmpfiles"; cat "$tmp/out"; fi

exit $failed
