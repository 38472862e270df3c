#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Starts kvd@0 under a systemd of its own, and looks from outside: what may the daemon do, does it come back?
#
#   boot.sh BUILDDIR KVD [CONFIG]   BUILDDIR: where the generated units are; KVD: the daemon
#
# The systemd is PID 1 of a new PID namespace, with /run, /var/lib and a control group of its own. It knows no units
# but ours, so it starts nothing else. That needs root, namespaces and a cgroup2 mount; without them this test is skipped.
set -u
here=$(cd "$(dirname "$0")" && pwd)
build=$1 kvd=$2 config=${3-/dev/null}
systemd=/lib/systemd/systemd
cgroups=$(findmnt -n -t cgroup2 -o TARGET | head -n 1)
for tool in $systemd unshare script systemd-sysusers systemd-tmpfiles; do
        command -v "$tool" >/dev/null || { echo "SKIP: $tool is not installed"; exit 77; }
done
[ "$(id -u)" = 0 ] || { echo "SKIP: not root"; exit 77; }
unshare --pid --fork --mount --propagation private --mount-proc --cgroup --net --uts --ipc true 2>/dev/null ||
        { echo "SKIP: no namespaces of our own (in a container or chroot?)"; exit 77; }
mkdir "$cgroups/kvd-boot.$$" 2>/dev/null || { echo "SKIP: no control group to work in"; exit 77; }
cgroup=$cgroups/kvd-boot.$$
tmp=$(mktemp -d) && [ -n "$tmp" ] || exit 1

clean() {
        echo 1 >"$cgroup/cgroup.kill"
        for _ in 1 2 3 4 5 6 7 8 9 10; do
                find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null && break
                sleep 0.1
        done
        rm -rf "$tmp"
}
trap clean EXIT

mkdir -p "$tmp/units" "$tmp/etc"
sed "s|^ExecStart=[^ ]*/kvd --config-optional [^ ]*|ExecStart=/run/kvd-boot/kvd --config-optional /run/kvd-boot/conf|" \
        "$build/kvd@.service" >"$tmp/units/kvd@.service"
cp "$here/../../../systemd/kvd@.socket" "$here/../../../systemd/kvd-gpu@.service" "$tmp/units"
mkdir "$tmp/units/kvd@.service.d"
printf '[Service]\nStandardOutput=append:%s\nStandardError=inherit\n' "$tmp/kvd.log" >"$tmp/units/kvd@.service.d/log.conf"
for target in sysinit basic sockets shutdown; do
        printf '[Unit]\nDefaultDependencies=no\n' >"$tmp/units/$target.target"
done
printf '[Unit]\nDefaultDependencies=no\nWants=look.service\n' >"$tmp/units/boot.target"
cat >"$tmp/units/look.service" <<END
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
StandardOutput=append:$tmp/result
StandardError=append:$tmp/result
ExecStart=/bin/bash $tmp/look.sh
END

cp /etc/passwd /etc/group "$tmp/etc"
systemd-sysusers --root="$tmp" "$here/../../../systemd/kvd.sysusers" 2>/dev/null || exit 1

# before systemd: in the namespaces, as PID 1
cat >"$tmp/init.sh" <<END
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount --bind "\$(tty)" /dev/console
mount --bind $tmp/etc/passwd /etc/passwd
mount --bind $tmp/etc/group /etc/group
mkdir /run/kvd-boot
cp $kvd /run/kvd-boot/kvd
cp $config /run/kvd-boot/conf
mknod -m 666 /run/kvd-boot/nvidia0 c 195 0
mknod -m 666 /run/kvd-boot/nvidia1 c 195 1
systemd-tmpfiles --create $here/../../../systemd/kvd.tmpfiles
exec env -i PATH="$PATH" container=kvd-boot SYSTEMD_UNIT_PATH=$tmp/units \
        $systemd --system --unit=boot.target --log-target=console --show-status=0
END

# under systemd: every line that it prints is a result
cat >"$tmp/look.sh" <<END
kvctl() { $build/../tools/kvctl/kvctl "\$@"; }
filler() { LD_LIBRARY_PATH=$build/../client $build/../tests/kvctl/kvctl-filler "\$@"; }
END
cat >>"$tmp/look.sh" <<'END'
export KVD_SOCKET=/run/kvd-0.sock
unit=kvd@0.service
adopted() { kvctl stat llama | awk '$1 == "adopted" { print $2 }'; }
in_the_end() {                  # as many blocks, once they are taken over: it serves before
        for _ in $(seq 600); do
                [ "$(adopted)" = "$1" ] && break
                sleep 0.1
        done
        adopted
}
show() { systemctl show -P "$1" $unit; }
expect() { if [ "$2" = "$3" ]; then echo "ok: $1"; else echo "not ok: $1: $2, not $3"; fi; }
field() { sed -n "s/^$1:[[:space:]]*\([^[:space:]]*\).*/\1/p" "/proc/$pid/status"; }
policy() {                      # on a device node, for root in the unit's control group
        bash -c 'echo $$ >"$1/cgroup.procs" && exec 3<>"$2"' - "/sys/fs/cgroup$(show ControlGroup)" "$1" 2>&1 |
                grep -q 'not permitted' && echo closed || echo open
}

systemctl start $unit
expect "starts without a GPU" "$(show ActiveState)" active
[ "$(show ActiveState)" = active ] || { echo end; exit; }
pid=$(show MainPID)
expect "socket is for group kvd" "$(stat -c '%a %U %G' /run/kvd-0.sock)" "660 root kvd"
expect "state directory is its own" "$(stat -c '%a %U %G' /var/lib/kvd/0)" "700 kvd kvd"
expect "not root" "$(field Uid)" "$(id -u kvd)"
expect "no capability" "$(field CapEff)$(field CapBnd)" 00000000000000000000000000000000
expect "no new privileges" "$(field NoNewPrivs)" 1
expect "system calls are filtered" "$(field Seccomp)" 2
expect "its GPU is allowed" "$(policy /run/kvd-boot/nvidia0)" open
expect "another's GPU is not" "$(policy /run/kvd-boot/nvidia1)" closed
expect "the kernel log is not" "$(policy /dev/kmsg)" closed

filler llama </dev/null >/dev/null
expect "begins empty" "$(adopted)" 0
socket=$(stat -c %i /run/kvd-0.sock)
kill -9 "$pid"
for _ in $(seq 600); do
        sleep 0.1
        [ "$(show ActiveState)" = active ] && [ "$(show MainPID)" != "$pid" ] && break
done
expect "comes back after kill -9" "$(show ActiveState) $(show NRestarts)" "active 1"
expect "the socket is still the same" "$(stat -c %i /run/kvd-0.sock)" "$socket"
expect "the cache is, too" "$(in_the_end 46)" 46
systemctl restart $unit
expect "after a restart, too" "$(in_the_end 46)" 46
expect "nothing is broken" "$(kvctl check llama >/dev/null; echo $?)" 0
systemctl stop $unit 2>/dev/null
expect "stops cleanly" "$(show ActiveState) $(show Result)" "inactive success"
systemctl start $unit
expect "begins empty after a stop" "$(kvctl spaces --json | tr -d ' \n')" '{"spaces":[]}'
systemctl stop $unit 2>/dev/null
echo end
END

touch "$tmp/result"
(
        echo $BASHPID >"$cgroup/cgroup.procs"
        exec script -qfc "unshare --pid --fork --kill-child --mount --propagation private --mount-proc \
                --cgroup --net --uts --ipc bash $tmp/init.sh" "$tmp/log"
) </dev/null >/dev/null 2>&1 &
boot=$!
disown
for _ in $(seq 2400); do
        grep -q '^end$' "$tmp/result" && break
        kill -0 $boot 2>/dev/null || break
        sleep 0.1
done

grep -v '^end$' "$tmp/result"
if ! grep -q '^end$' "$tmp/result" || grep -q '^not ok' "$tmp/result"; then
        cat "$tmp/log" "$tmp/kvd.log"
        exit 1
fi
