# SPDX-License-Identifier: Apache-2.0
#
# Runs for install.sh in its fresh root, under systemd and as root: /old has the packages, /new their next version.
failed=0
expect() { if [ "$2" = "$3" ]; then echo "ok: $1"; else echo "not ok: $1: $2, not $3"; failed=1; fi; }
as() { name=$1; shift; runuser -u "$name" -- env KVD_SOCKET=/run/kvd-0.sock "$@" 2>&1; }
show() { systemctl show -P "$1" kvd@0.service; }
left() {                        # lists all files except logs, caches and those that dpkg knows
        find / -xdev \( -path /proc -o -path /sys -o -path /var/log -o -path /var/cache -o -path /var/lib/dpkg \
                -o -path /var/lib/apt -o -path "/look.*" -o -path /var/lib/systemd -o -name __pycache__ \) -prune \
                -o -print | sort
        getent passwd
        getent group
}

useradd alice
useradd bob
left >/tmp/before
dpkg -i /old/*.deb >/tmp/log 2>&1 || { cat /tmp/log; exit 1; }
expect "user kvd" "$(getent passwd kvd | cut -d : -f 1,6-)" "kvd:/var/lib/kvd:/usr/sbin/nologin"
expect "nothing is started" "$(systemctl is-active kvd@0.socket)" inactive
expect "manual pages" "$(test -e /usr/share/man/man8/kvd.8.gz && echo there)" there
usermod -aG kvd alice
systemctl enable --now kvd@0.socket 2>/dev/null

expect "a member of group kvd asks" "$(as alice kvctl ping | cut -d ' ' -f 1-2)" \
        "kvd $(dpkg-query -W -f '${Version}' kvd)"
expect "somebody else may not" "$(as bob kvctl ping | grep -c 'become a member of its group')" 1
expect "Python, first" "$(as alice python3 /quickstart.py)" "0 tokens found, 64 computed"
expect "Python, again" "$(as alice python3 /quickstart.py)" "64 tokens found, 0 computed"
expect "the kernels, too" "$(as alice python3 -c 'import ctypes; ctypes.CDLL("libkvd_kernels.so.0")')" ""
expect "Python knows its package" "$(as alice python3 -c 'from importlib.metadata import entry_points, version
print(version("kvd"), *[it.name for it in entry_points(group="vllm.general_plugins")])')" \
        "$(dpkg-query -W -f '${Version}' kvd) kvd"
expect "C, first" "$(as alice /example | head -n 1)" "0 tokens reused, 12 computed"
expect "C, again" "$(as alice /example | head -n 1)" "12 tokens reused, 0 computed"

pid=$(show MainPID)
dpkg -i /new/*.deb >/tmp/log 2>&1 || { cat /tmp/log; exit 1; }
expect "an upgrade restarts it" "$([ "$(show MainPID)" != "$pid" ] && show ActiveState)" active
expect "the socket stays" "$(systemctl is-active kvd@0.socket)" active
expect "and the cache" "$(as alice /example | head -n 1)" "12 tokens reused, 0 computed"
expect "nothing is broken" "$(as alice kvctl check >/tmp/log; echo $?)" 0

echo '[daemon]' >/etc/kvd/0.conf
dpkg --remove kvd >/tmp/log 2>&1
expect "removed, it runs no longer" "$(grep -lx kvd /proc/[0-9]*/comm 2>/dev/null)" ""
expect "and its socket has gone" "$(ls /run/kvd-0.sock 2>/dev/null)" ""
usermod -rG kvd alice 2>/dev/null || gpasswd -d alice kvd >/dev/null
dpkg --purge kvd libkvd-dev kvctl python3-kvd libkvd0 libkvd-kernels0 >/tmp/log 2>&1 || { cat /tmp/log; exit 1; }
left >/tmp/after
expect "nothing is left behind" "$(diff /tmp/before /tmp/after)" ""
expect "nor a unit" "$(systemctl list-units --all --no-legend 'kvd*')" ""
exit $failed
