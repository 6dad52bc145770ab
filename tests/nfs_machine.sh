#!/usr/bin/env bash
# Runs a command on a machine whose kernel has NFS, server and client, for the tests of it: where this kernel has neither.
# The machine is Debian's user-mode-linux: a kernel that runs as a process, needs no /dev/kvm and no image. It reads this
# machine's files, and writes to memory alone; only $OUT is kept. The lab of SLURM starts in it, too. It has one core,
# and system calls and page faults take many times as long: torch imports in a minute.
#
#   tests/nfs_machine.sh .venv/bin/python -m pytest -m stress tests/test_nfs.py
#   OUT=/var/tmp/nfs tests/nfs_machine.sh bash -c 'uname -a >$OUT/kernel.txt'
#
# Needs root, the packages named below, and MEMORY (default 4G) in /dev/shm. Ends with the command's exit code.
set -euo pipefail

[ $# -gt 0 ] || { echo "error: give a command; the head of $0 has examples" >&2 && exit 2; }
[ "$(id -u)" = 0 ] || { echo "error: files are read as root; run: sudo $0 $*" >&2 && exit 2; }
for program in linux.uml modprobe rpc.nfsd mkfs.ext4 ip setquota; do
    command -v "$program" >/dev/null || { echo "error: no $program; run: apt-get install --no-install-recommends" \
        "user-mode-linux kmod nfs-kernel-server e2fsprogs iproute2 quota" >&2 && exit 2; }
done
# Every page of its processes is a mapping of one process here.
[ "$(cat /proc/sys/vm/max_map_count)" -ge 1000000 ] ||
    { echo "error: processes may have too few mappings; run: sysctl vm.max_map_count=1000000" >&2 && exit 2; }

work=$(mktemp --directory "${TMPDIR:-/var/tmp}/nfs-machine-XXXXXX")
trap 'rm --recursive --force --one-file-system "$work"' EXIT
out=${OUT:-$work/out}
mkdir -p "$out"

# The machine's first program. Names of this machine's directories stay as they are, and read-only.
{
    printf '%s\n' '#!/bin/bash' "work=$work out=$(realpath "$out")" "cd ${PWD@Q}" "command=(${*@Q})"
    printf 'export %s\n' PATH="${PATH@Q}" HOME=/tmp TERM=dumb LANG=C.UTF-8 OUT=/srv PYTHONDONTWRITEBYTECODE=1
    cat <<'INIT'
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/freezer
mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd  # slurmd looks for it
mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer
ln -s /proc/self/fd /dev/fd
mkdir -p /dev/shm /dev/pts
mount -t devpts devpts /dev/pts
for directory in /tmp /var/tmp /run /dev/shm /var/lib/nfs; do mount -t tmpfs -o mode=1777 tmpfs $directory; done
mount -t hostfs -o "$out" none /srv
mount -t hostfs -o "$work" none /mnt
mkdir -p /tmp/modules/lib
ln -s /usr/lib/uml/modules /tmp/modules/lib/modules
for module in nfs nfsv3 nfsv4 nfsd loop veth dummy quota_v2; do modprobe --dirname=/tmp/modules $module; done
ip link set lo up
# SLURM's commands resolve no name on a machine without an address of its own.
ip link add machine type dummy
ip address add 10.78.0.1/24 dev machine
ip link set machine up
hostname nfs
"${command[@]}" </dev/null
echo $? >/mnt/status
sync
echo o >/proc/sysrq-trigger
sleep 60
INIT
} >"$work/init"
chmod 755 "$work/init"

TMPDIR=/dev/shm linux.uml mem="${MEMORY:-4G}" root=/dev/root rootfstype=hostfs rootflags=/ ro init="$work/init" quiet \
    con=null con0=null,fd:1 </dev/null
exit "$(cat "$work/status" || echo 1)"
