#!/usr/bin/env bash
# Runs README's commands on a machine that has nothing: a minimal Debian of its own, an empty environment, no pip
# configuration, no compiler, no git, no GPU. Needs root, debootstrap, the network and 12 GB; takes an hour and more.
#
#   tests/fresh_machine.sh trixie                       make demo and make test, with the Python 3.13 that trixie has
#   tests/fresh_machine.sh trixie --smoke               make venv, and the smoke study in place of both
#   tests/fresh_machine.sh trixie --smoke --as-root     as root in /root; otherwise as a user in a path with a space,
#                                                       with umask 077
#   tests/fresh_machine.sh bookworm -- COMMAND...       any other commands, each one argument; bookworm has Python 3.11, which
#                                                       make refuses
#
# /tmp has 8 GB, of which make test takes 5; with --smoke 1 GB.
#
# It makes the Debian below FRESH_MACHINES (default /var/tmp) and removes it at the end, unless given --keep.
set -euo pipefail

suite=${1:?give trixie or bookworm}
shift
commands=("make demo" "make test") keep=
user=user directory="/home/user/a checkout" umask=077 tmp_size=8g
while [ $# -gt 0 ]; do
    case $1 in
    --smoke) commands=("make venv" ".venv/bin/python -m study run tiny --profile smoke") tmp_size=1g ;;
    --as-root) user=root directory=/root/quantdyn umask=022 ;;
    --keep) keep=1 ;;
    --) shift && commands=("$@") && break ;;
    *) echo "error: unknown argument $1; the head of $0 has examples" >&2 && exit 2 ;;
    esac
    shift
done
[ "$(id -u)" = 0 ] || { echo "error: a Debian is made as root; run: sudo $0 $suite" >&2 && exit 2; }
command -v debootstrap >/dev/null || { echo "error: no debootstrap; run: apt-get install debootstrap" >&2 && exit 2; }

repository=$(cd "$(dirname "$0")/.." && pwd)
root=$(mktemp --directory "${FRESH_MACHINES:-/var/tmp}/fresh-$suite-XXXXXX")
trap '[ -n "$keep" ] && echo "kept: $root" || rm --recursive --force --one-file-system "$root"' EXIT
chmod 755 "$root"
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,make "$suite" "$root" >"$root.log" 2>&1 ||
    { tail -n 3 "$root.log" >&2 && echo "error: debootstrap failed; $root.log has the rest" >&2 && exit 2; }
rm "$root.log"
cp --dereference /etc/resolv.conf /etc/hosts "$root/etc/"
cp --dereference /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
[ "$user" = root ] || chroot "$root" useradd --create-home "$user"
(umask "$umask" && git clone --quiet --no-local "$repository" "$root$directory")
chroot "$root" chown --recursive "$user:" "$directory"

# What runs inside, as $user.
printf '%s\n' '#!/bin/bash' 'set -euo pipefail' "umask $umask" "cd '$directory'" 'python3 --version' >"$root/commands"
for command in "${commands[@]}"; do
    printf '%s\n' "echo; echo \"\$ $command\"; SECONDS=0" "$command" 'echo "took $SECONDS s; $(du -sh .venv 2>&1)"'
done >>"$root/commands"
chmod 755 "$root/commands"

export root user tmp_size
# /proc and mounts of its own: nothing that runs inside outlives it, nothing stays mounted.
unshare --mount --pid --fork --kill-child bash -euc '
    mount --make-rprivate /
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t tmpfs -o size=$tmp_size,mode=1777 tmpfs "$root/tmp"
    home=$(chroot "$root" getent passwd "$user" | cut -d: -f6)
    exec chroot --userspec="$user" "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$home" USER="$user" \
        LANG=C.UTF-8 ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} /commands'
