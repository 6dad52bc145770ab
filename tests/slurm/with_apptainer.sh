#!/usr/bin/env bash
# Runs a command with an apptainer on PATH and an image for it in SANDBOX: a Debian 13, unpacked, with a Python.
#
#   tests/slurm/with_apptainer.sh .venv/bin/python -m pytest -m stress tests/slurm/test_apptainer.py
#
# Where no apptainer is installed it is that of Debian's package in sid, on the C library of the image. Needs root,
# debootstrap, patchelf, the network, 600 MB below FRESH_MACHINES (default /var/tmp) and some minutes.
set -euo pipefail

[ $# -gt 0 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
[ "$(id -u)" = 0 ] || { echo "error: a Debian is made as root; run: sudo $0 $*" >&2 && exit 2; }
for program in debootstrap patchelf; do
    command -v $program >/dev/null || { echo "error: no $program; run: apt-get install $program" >&2 && exit 2; }
done

directory=$(mktemp --directory "${FRESH_MACHINES:-/var/tmp}/apptainer-XXXXXX")
trap 'rm --recursive --force --one-file-system "$directory"' EXIT
chmod 755 "$directory"
image=$directory/trixie
debootstrap --variant=minbase --include=ca-certificates,python3,libgomp1 trixie "$image" >"$directory/log" 2>&1 ||
    { tail -n 3 "$directory/log" >&2 && echo "error: debootstrap failed" >&2 && exit 2; }

if ! command -v apptainer >/dev/null; then
    cp --dereference /etc/resolv.conf "$image/etc/"
    sed --in-place s/trixie/sid/ "$image/etc/apt/sources.list"
    chroot "$image" sh -euc 'apt-get -o Acquire::Check-Valid-Until=false update && cd /tmp && apt-get download apptainer' >>"$directory/log" 2>&1 ||
        { tail -n 3 "$directory/log" >&2 && echo "error: apt-get found no apptainer" >&2 && exit 2; }
    program=$directory/apptainer
    dpkg --extract "$image"/tmp/apptainer_*.deb "$program"
    rm "$image"/tmp/apptainer_*.deb
    # It finds its files from its own place, and the starter, one folder deeper, by other steps up.
    mv "$program/etc" "$program/var" "$program/usr/"
    ln --symbolic ../etc ../var "$program/usr/lib/"
    for binary in "$program"/usr/bin/apptainer "$program"/usr/lib/*/apptainer/bin/starter; do
        patchelf --set-interpreter "$image"/usr/lib64/ld-linux-x86-64.so.2 "$binary"
        patchelf --force-rpath --set-rpath "$image/usr/lib/x86_64-linux-gnu" "$binary"
    done
    export PATH=$program/usr/bin:$PATH
fi
SANDBOX=$image "$@"
