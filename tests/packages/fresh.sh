# SPDX-License-Identifier: Apache-2.0
#
# A fresh, minimal Debian 12 in a folder, with its own systemd; other scripts source this.
#
#   fresh_root DIR PACKAGE...       installs it in DIR; needs root, mmdebstrap and a mirror, or ends with 77
#   fresh_boot DIR SECONDS          runs DIR/look.sh, as root, under a systemd that is PID 1 of a new PID namespace; its
#                                   output is in DIR/look.log, and the status is that of look.sh
#
# The namespaces have no network but loopback. Their processes end with fresh_boot.

mirror=${KVD_TEST_MIRROR-http://deb.debian.org/debian}
cgroups=$(findmnt -n -t cgroup2 -o TARGET | head -n 1)
namespaces='unshare --pid --fork --kill-child --mount --propagation private --cgroup --net --uts --ipc'

skip() { echo "SKIP: $*"; exit 77; }

fresh_possible() {
        [ "$(id -u)" = 0 ] || skip "not root"
        for tool in mmdebstrap unshare script; do
                command -v $tool >/dev/null || skip "$tool is not installed"
        done
        $namespaces true 2>/dev/null || skip "no namespaces of our own (in a container or chroot?)"
        cgroup=$cgroups/kvd-fresh.$$
        mkdir "$cgroup" 2>/dev/null || skip "no control group to work in"
        rmdir "$cgroup"
        /usr/lib/apt/apt-helper -o Acquire::Retries=0 download-file "$mirror/dists/bookworm/Release" "$1/Release" \
                >/dev/null 2>&1 || skip "$mirror is not reachable"
}

fresh_root() {
        at=$1
        shift
        mmdebstrap --quiet --variant=minbase --dpkgopt=force-unsafe-io --include="$(echo "$*" | tr ' ' ,)" \
                bookworm "$at" "$mirror" >"$at.log" 2>&1 || { tail -n 20 "$at.log"; return 1; }
        mkdir -p "$at/etc/systemd/system"
        # In addition to the basic system, only look.service is started.
        printf '[Unit]\nRequires=basic.target\nAfter=basic.target\nWants=look.service\n' \
                >"$at/etc/systemd/system/look.target"
        cat >"$at/etc/systemd/system/look.service" <<'END'
[Service]
Type=oneshot
Environment=HOME=/root DEBIAN_FRONTEND=noninteractive
ExecStart=/bin/bash -c 'bash /look.sh >/look.log 2>&1; echo $? >/look.status'
END
}

fresh_init() {                  # in the namespaces, as PID 1
        cat <<END
set -e
mount --bind $1 $1
cd $1
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount -t tmpfs tmpfs dev
mkdir dev/shm dev/pts
mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
for node in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
        IFS=: read -r name major minor <<<"\$node"
        mknod -m 666 dev/\$name c \$major \$minor
done
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
touch dev/console
mount --bind "\$(tty)" dev/console
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=kvd-fresh chroot . /lib/systemd/systemd --system \
        --unit=look.target --log-target=console --show-status=0
END
}

fresh_boot() {
        at=$1 seconds=$2
        cgroup=$cgroups/kvd-fresh.$$
        mkdir "$cgroup"
        rm -f "$at/look.status"
        fresh_init "$at" >"$at.init.sh"
        (
                echo $BASHPID >"$cgroup/cgroup.procs"
                exec script -qfc "$namespaces bash $at.init.sh" "$at.boot.log"
        ) </dev/null >/dev/null 2>&1 &
        boot=$!
        disown
        for _ in $(seq $((seconds * 10))); do
                [ -s "$at/look.status" ] && break
                kill -0 $boot 2>/dev/null || break
                sleep 0.1
        done
        fresh_end
        [ -s "$at/look.status" ] || { tail -n 30 "$at.boot.log"; return 1; }
        return "$(cat "$at/look.status")"
}

fresh_end() {
        [ -d "$cgroup" ] || return 0
        echo 1 >"$cgroup/cgroup.kill"
        for _ in 1 2 3 4 5 6 7 8 9 10; do
                find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null && break
                sleep 0.1
        done
}
