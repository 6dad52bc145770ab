#!/usr/bin/env bash
# Runs a command under the SLURM of another Debian, whose /usr and /etc take the place of this machine's for
# the command and what it starts. Everything else stays: the checkout, .venv, /tmp, /proc.
#
#   tests/other_slurm.sh trixie                                          names its SLURM, which is 24.11
#   tests/other_slurm.sh trixie .venv/bin/python -m pytest tests/slurm   all labs of these tests have it
#   tests/other_slurm.sh trixie .venv/bin/python -m tests.slurm.lab start DIR --accounting
#
# Needs root. The first call makes the system below OTHER_SLURMS (default /var/tmp), where it stays: debootstrap, the
# network, 2 minutes, 0.8 GB. Python of .venv has to be outside /usr, or in /usr/local, and not newer than the system.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=${1:?give a suite, such as trixie; the head of $0 has examples}
shift
[ $# -gt 0 ] || set -- slurmctld -V
[ "$(id -u)" = 0 ] || { echo "error: another SLURM runs as root; run: sudo $0 $suite" >&2 && exit 2; }
[ /bin -ef /usr/bin ] || { echo "error: /bin is not /usr/bin here; run this on a newer system" >&2 && exit 2; }
root=$(realpath "${OTHER_SLURMS:-/var/tmp}")/slurm-$suite

make_system() {
    command -v debootstrap >/dev/null || { echo "error: no debootstrap; run: apt-get install debootstrap" >&2 && exit 2; }
    local new packages
    packages=$(.venv/bin/python -c "from tests.slurm.lab import PACKAGES; print(PACKAGES.replace(' ', ','))")
    mkdir --parents "$(dirname "$root")"
    new=$(mktemp --directory "$root-XXXXXX")
    # python3 brings the libraries that other Pythons need, too
    debootstrap --force-check-gpg --variant=minbase --components=main,universe \
        --include="$packages,python3,procps,git,ca-certificates" "$suite" "$new" >"$new.log" 2>&1 ||
        { tail -n 3 "$new.log" >&2 && rm --recursive --force --one-file-system "$new" &&
            echo "error: debootstrap failed; $new.log has the rest" >&2 && exit 2; }
    rm --force "$new.log" "$new"/var/cache/apt/archives/*.deb
    chmod 755 "$new"
    cp --dereference /etc/resolv.conf /etc/hosts "$new/etc/"
    mv --no-target-directory "$new" "$root"
}
[ -d "$root" ] || make_system

export root
# A mount namespace ends with its last process: nothing stays mounted.
exec unshare --mount bash -euc '
    mount --rbind /usr/local "$root/usr/local"
    mount --rbind "$root/usr" /usr
    mount --rbind "$root/etc" /etc
    hash -r
    .venv/bin/python -c "import ctypes, sqlite3, ssl" ||
        { echo "error: the Python of .venv does not run under $root; make .venv with another" >&2 && exit 2; }
    exec "$@"' other_slurm "$@"
