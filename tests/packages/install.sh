#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the packages, and installs, uses, upgrades and purges them in a fresh Debian 12 under its own systemd.
#
#   install.sh ROOT          ROOT: the source tree
#
# $KVD_PACKAGES may name a folder with packages built earlier (sh tools/deb --out).
set -u
root=$1
here=$(cd "$(dirname "$0")" && pwd)
. "$here/fresh.sh"
tmp=$(mktemp -d) && [ -n "$tmp" ] || exit 1
cgroup=$tmp/none
trap 'fresh_end; rm -rf --one-file-system "$tmp"' EXIT
for tool in dpkg-buildpackage dh_python3 lintian; do
        command -v $tool >/dev/null || skip "$tool is not installed"
done
fresh_possible "$tmp"

failed=0
expect() { if [ "$2" = "$3" ]; then echo "ok: $1"; else echo "not ok: $1: $2, not $3"; failed=1; fi; }

packages=${KVD_PACKAGES-}
if [ -z "$packages" ]; then
        packages=$tmp/packages
        sh "$root/tools/deb" --out "$packages" >"$tmp/deb.log" 2>&1 || { cat "$tmp/deb.log"; exit 1; }
fi
expect "six packages" "$(ls "$packages"/*.deb | sed 's/.*\/\(.*\)_.*_.*/\1/' | sort | tr '\n' ' ')" \
        "kvctl kvd libkvd-dev libkvd-kernels0 libkvd0 python3-kvd "
lintian --allow-root --fail-on error,warning --display-level '>=warning' "$packages"/*.changes >"$tmp/lintian.log" 2>&1
expect "lintian is content" "$?$(cat "$tmp/lintian.log")" 0

# everything that they depend on, so that files left after a purge are theirs
wants=$(for deb in "$packages"/*.deb; do dpkg-deb -f "$deb" Depends; done | tr ',' '\n' |
        sed 's/|.*//; s/(.*//; s/ //g; s/:any//' | grep -vE 'kvd|kvctl' | sort -u)
# shellcheck disable=SC2086
fresh_root "$tmp/root" systemd $wants || exit 1

# the same packages, as the next version
mkdir "$tmp/root/old" "$tmp/root/new"
cp "$packages"/*.deb "$tmp/root/old"
for deb in "$packages"/*.deb; do
        dpkg-deb -R "$deb" "$tmp/unpacked"
        sed -i -E 's/^(Version: .*)/\1+next/; s/(kvd(-kernels)?0 \(= [^)]*)/\1+next/g' "$tmp/unpacked/DEBIAN/control"
        dpkg-deb -Znone -b "$tmp/unpacked" "$tmp/root/new" >/dev/null
        rm -rf "$tmp/unpacked"
done

# README's Python program unchanged, and libkvd(3)'s C program, built here with the headers and libraries of the fresh root
PYTHONPATH=$root/tests/tree/pasted PYTHONDONTWRITEBYTECODE=1 python3 - "$root" "$tmp" <<'END' || exit 1
import pathlib, sys, blocks
for page in "README.md", "tools/man/libkvd.3":
    for block in blocks.blocks_of(pathlib.Path(sys.argv[1], page)):
        if block.mark == "file":
            pathlib.Path(sys.argv[2], block.value).write_text(block.text)
END
cp "$tmp/quickstart.py" "$tmp/root"
mkdir "$tmp/sysroot"
dpkg-deb -x "$packages"/libkvd0_*.deb "$tmp/sysroot"
dpkg-deb -x "$packages"/libkvd-dev_*.deb "$tmp/sysroot"
lib=$(dirname "$(find "$tmp/sysroot" -name libkvd.pc)")
flags=$(PKG_CONFIG_SYSROOT_DIR=$tmp/sysroot PKG_CONFIG_LIBDIR=$lib pkg-config --cflags --libs libkvd)
# shellcheck disable=SC2086
cc "$tmp/example.c" -o "$tmp/root/example" $flags -Wl,--unresolved-symbols=ignore-in-shared-libs
expect "a C program is built with libkvd-dev" "$?" 0

cp "$here/look.sh" "$tmp/root"
fresh_boot "$tmp/root" 900
expect "under systemd" "$?" 0
cat "$tmp/root/look.log"

# Runs the steps of the container's recipe that make the image in the same root, without a container engine: those of its
# stage "runtime", the list of what is installed, and the last stage's start.
container=$root/tools/container
mkdir "$tmp/root/packages"
cp "$packages"/kvd_*.deb "$packages"/kvctl_*.deb "$tmp/root/packages"
cp "$container/sbom" "$tmp/root/sbom"
cp -L /etc/resolv.conf "$tmp/root/etc/resolv.conf"
last() { sed -n "s/^$1 //p" "$container/Containerfile" | tail -n 1; }
{
        echo set -e
        awk '/^FROM/ { on = / AS runtime$/ } on && sub(/^RUN /, "")' "$container/Containerfile"
        echo 'sh /sbom >/kvd.spdx.json'
        echo "export $(last ENV)"
        echo "as='setpriv --reuid $(last USER | sed 's/:/ --regid /') --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs'"
        echo "\$as $(last ENTRYPOINT | tr -d '[],"') --pool 64M &"
        # shellcheck disable=SC2016
        echo 'for _ in $(seq 600); do $as kvctl health 2>/dev/null && break; sleep 0.1; done'
        echo 'kill %1; wait %1'
} >"$tmp/root/container.sh"
unshare --pid --fork --kill-child --mount-proc="$tmp/root/proc" chroot "$tmp/root" /usr/bin/env -i \
        PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive bash /container.sh >"$tmp/container.log" 2>&1
expect "the container's recipe" $? 0
expect "kvd serves in it" "$(grep -c '^ready: kvd ' "$tmp/container.log")" 1
expect "its list of packages has kvd" "$(grep -c '"name": "kv\(d\|ctl\)", "versionInfo"' "$tmp/root/kvd.spdx.json")" 2
[ "$failed" = 0 ] || tail -n 20 "$tmp/container.log"
exit $failed
