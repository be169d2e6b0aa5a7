#!/usr/bin/env bash
# Brings a Debian host to where Atoll builds and runs: packages, and the pool (a file system with reflinks).
# Idempotent. `--for-tests` adds what only the tests need. ATOLL_POOL names another pool than /var/lib/atoll.
set -euo pipefail

pool=${ATOLL_POOL:-/var/lib/atoll}
pool=${pool%/}
image=$pool.img
log=/var/log/atoll-setup.log
gigabyte=$((1000 * 1000 * 1000))
space_needed=$((12 * gigabyte))
largest_image=$((200 * gigabyte))
minimum_qemu=1:8.2

say() { printf '[%4ds] %s\n' "$SECONDS" "$*" >&2; }
told=no
fail() {
    printf 'setup: %s\n' "$*" >&2
    told=yes
    exit 1
}

# `set -e` ends the script without a word.
explain_end() {
    local status=$?
    [ "$status" -ne 0 ] && [ "$status" -lt 128 ] && [ "$told" = no ] || return 0
    printf 'setup: a command failed (exit status %s): see %s, and `bash -x %s` for which one\n' "$status" "$log" "$0" >&2
}
trap explain_end EXIT

# ---- packages ----

host_packages=(
    mmdebstrap debian-archive-keyring e2fsprogs xfsprogs mount util-linux nftables iproute2 xz-utils zstd tar gzip
    ca-certificates curl git gcc make pkg-config libc6-dev
)

installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}\n' "$@" 2>/dev/null | grep -cx installed)" -ge $# ]
}

qemu_version() { dpkg-query -W -f '${Version}' qemu-system-x86 2>/dev/null || true; }

qemu_suffices() {
    local version
    version=$(qemu_version)
    [ -n "$version" ] && dpkg --compare-versions "$version" ge "$minimum_qemu" && installed qemu-system-x86
}

has_node() {
    local version
    version=$(node --version 2>/dev/null) || return 1
    version=${version#v}
    [ "${version%%.*}" -ge 18 ] && command -v npm >/dev/null
}

has_python() {
    python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

has_postgres() { compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null; }

# Fills the array `missing` with what has to be installed from the host's own suite.
find_missing() {
    missing=()
    local package
    if ! installed "${host_packages[@]}"; then
        for package in "${host_packages[@]}"; do
            installed "$package" || missing+=("$package")
        done
    fi
    if [ "$for_tests" = yes ]; then
        installed cpio || missing+=(cpio)
        installed g++ || missing+=(g++)
        has_python || missing+=(python3 python3-venv)
        has_node || missing+=(nodejs npm)
        has_postgres || missing+=(postgresql)
    fi
    # Not `[ ] && …` as the last command: its failure would end the script.
    return 0
}

apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@" >>"$log" 2>&1 9>&-
}

index_is_fresh=no
refresh_index() {
    [ "$index_is_fresh" = no ] || return 0
    say "reading the package lists"
    apt update || fail "the package lists could not be read: check the network and the apt sources (see $log)"
    index_is_fresh=yes
}

install_packages() {
    refresh_index
    say "installing $*"
    apt install --no-install-recommends "$@" ||
        fail "the packages could not be installed: check the network and the apt sources (see $log)"
}

# The mirror that the host's own apt sources name for the suite $1, in either format; empty when there is none.
mirror_of() {
    local suite=$1 files=()
    shopt -s nullglob
    files=(/etc/apt/sources.list.d/*.sources)
    if [ ${#files[@]} -gt 0 ]; then
        awk -v suite="$suite" '
            function stanza_ends() {
                if (uri != "" && (" " suites " ") ~ (" " suite " ") && types ~ /(^| )deb( |$)/ && enabled != "no") { print uri; exit }
                uri = suites = types = enabled = ""
            }
            FNR == 1 { stanza_ends() }
            /^[ \t]*$/ { stanza_ends(); next }
            tolower($1) == "uris:" { uri = $2 }
            tolower($1) == "types:" { $1 = ""; types = $0 }
            tolower($1) == "suites:" { $1 = ""; suites = $0 }
            tolower($1) == "enabled:" { enabled = $2 }
            END { stanza_ends() }
        ' "${files[@]}" | head -n 1
    fi
    files=(/etc/apt/sources.list.d/*.list)
    shopt -u nullglob
    # Where the other format is in use it may be missing.
    [ ! -e /etc/apt/sources.list ] || files+=(/etc/apt/sources.list)
    awk -v suite="$suite" '
        $1 == "deb" {
            line = $0
            sub(/^deb[ \t]+(\[[^]]*\][ \t]*)?/, "", line)
            split(line, word, /[ \t]+/)
            if (word[2] == suite) { print word[1]; exit }
        }
    ' "${files[@]}" /dev/null
}

# Debian 12 has QEMU 7.2; its backports have one that can map memory privately and read-only.
install_qemu() {
    if [ "$debian" -ge 13 ]; then
        install_packages qemu-system-x86
        return
    fi
    local suite=$codename-backports
    refresh_index
    if ! apt-cache madison qemu-system-x86 2>/dev/null | grep -q "$suite/"; then
        local mirror
        mirror=$(mirror_of "$codename" | head -n 1)
        [ -n "$mirror" ] || fail "no apt source of this host names $codename, so its backports (for QEMU 8.2) cannot be found: add them to /etc/apt/sources.list.d"
        say "adding $suite to the apt sources"
        cat >/etc/apt/sources.list.d/atoll-backports.sources <<SOURCES
Types: deb
URIs: $mirror
Suites: $suite
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCES
        index_is_fresh=no
    fi
    install_packages -t "$suite" qemu-system-x86
}

set_up_packages() {
    find_missing
    [ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
    qemu_suffices || install_qemu
    qemu_suffices || fail "QEMU $(qemu_version) is too old: 8.2 or later is needed, from $codename-backports"
}

# ---- the Rust toolchain ----

set_up_rust() {
    command -v cargo >/dev/null || [ ! -x "$HOME/.cargo/bin/cargo" ] || PATH=$HOME/.cargo/bin:$PATH
    if ! command -v cargo >/dev/null && [ "$debian" -ge 13 ]; then
        install_packages rustup ca-certificates
    fi
    command -v cargo >/dev/null ||
        fail "Rust is missing: install it with rustup (https://rustup.rs), then run this again"
    if ! cargo --version >/dev/null 2>&1; then
        say "installing the stable Rust toolchain"
        rustup default stable >>"$log" 2>&1 ||
            fail "the Rust toolchain could not be installed: run \`rustup default stable\` (see $log)"
    fi
}

# ---- the pool ----

can_reflink() {
    local probe result=1
    probe=$(mktemp -d "$1/.probe-XXXXXX") || return 1
    head -c 65536 /dev/zero >"$probe/a"
    cp --reflink=always "$probe/a" "$probe/b" 2>/dev/null && result=0
    rm -rf "$probe"
    return $result
}

free_bytes() { df --output=avail -B1 "$1" | tail -n 1 | tr -d ' '; }

# Only for a pool that is to be made: one that exists has passed.
check_space() {
    local free
    free=$(free_bytes "$1")
    [ "$free" -ge "$space_needed" ] ||
        fail "too little disk space: $((free / gigabyte)) GB are free at $1, $((space_needed / gigabyte)) GB are needed; free some or set ATOLL_POOL to a directory on a larger disk"
}

check_loop_devices() {
    [ -e /dev/loop-control ] || modprobe loop 2>/dev/null || true
    losetup -f >/dev/null 2>&1 ||
        fail "no loop device can be had and $pool cannot share blocks between files: run this where loop devices exist, or set ATOLL_POOL to a directory on XFS or btrfs"
}

make_image() {
    local free reserve size
    free=$(free_bytes "$(dirname "$image")")
    reserve=$((free / 20 > 4 * gigabyte ? free / 20 : 4 * gigabyte))
    size=$((free - reserve < largest_image ? free - reserve : largest_image))
    say "making $image (sparse, up to $((size / gigabyte)) GB)"
    rm -f "$image.new"
    truncate -s "$size" "$image.new"
    mkfs.xfs -q -f -m reflink=1 "$image.new" >>"$log" 2>&1 || fail "$image could not be formatted as XFS (see $log)"
    sync "$image.new"
    mv "$image.new" "$image"
}

# What was deleted in the pool stays allocated in the image until it is trimmed.
trim_image() {
    local allocated used
    [ -e "$image" ] || return 0
    allocated=$(($(stat -c %b "$image") * 512))
    used=$(df --output=used -B1 "$pool" | tail -n 1 | tr -d ' ')
    [ $((allocated - used)) -lt $((8 * gigabyte)) ] && return 0
    say "giving deleted blocks of $image back"
    fstrim "$pool" >>"$log" 2>&1 || true
}

set_up_pool() {
    if mountpoint -q "$pool"; then
        trim_image
        return
    fi
    mkdir -p "$pool"
    if [ ! -e "$image" ]; then
        if can_reflink "$pool"; then
            return
        fi
        [ -z "$(ls -A "$pool")" ] ||
            fail "$pool is not empty and its file system cannot share blocks between files: move its contents away or set ATOLL_POOL"
        check_space "$(dirname "$pool")"
        check_loop_devices
        make_image
    else
        check_loop_devices
    fi
    say "mounting $image at $pool"
    mount -t xfs -o loop,noatime "$image" "$pool" >>"$log" 2>&1 ||
        fail "$image could not be mounted at $pool: the kernel must know XFS and allow mounts (see $log)"
    # Guests' processes run unprivileged and reach their own directory below by name.
    chmod 711 "$pool"
    can_reflink "$pool" || fail "$pool cannot share blocks between files although it is on XFS: delete $image and run this again"
}

# ---- packages of PyPI that tests use ----

# An environment below the target directory for each list; a test whose list is not installed does it itself, late.
set_up_python() {
    local repository target list place
    repository=$(cd "$(dirname "$0")/.." && pwd)
    target=${CARGO_TARGET_DIR:-$repository/target}
    for list in "$repository"/tests/*.txt; do
        place=$target/test-python/$(basename "$list" .txt)
        cmp -s "$list" "$place/packages" && continue
        say "installing $(tr '\n' ' ' <"$list")for the tests"
        if python3 -m venv --clear "$place" >>"$log" 2>&1 9>&- &&
            "$place/bin/python" -m pip install --quiet --disable-pip-version-check -r "$list" >>"$log" 2>&1 9>&-; then
            cp "$list" "$place/packages"
        else
            say "the packages of $list could not be installed (see $log)"
        fi
    done
}

# ----

for_tests=no
for argument in "$@"; do
    case $argument in
    --for-tests) for_tests=yes ;;
    *) fail "unknown argument $argument (only --for-tests is known)" ;;
    esac
done

[ "$(id -u)" -eq 0 ] || fail "this needs root: run it with sudo"
. /etc/os-release
debian=${VERSION_ID:-0}
debian=${debian%%.*}
codename=${VERSION_CODENAME:-}
[ "${ID:-}" = debian ] && [ "$debian" -ge 12 ] ||
    fail "this host runs ${PRETTY_NAME:-an unknown system}, and Atoll is set up on Debian 12 or later"
[ "$(dpkg --print-architecture)" = amd64 ] || fail "this host is $(dpkg --print-architecture), and Atoll runs on amd64"

# Two at once would both make the image.
exec 9>/run/atoll-setup.lock
flock -n 9 || {
    say "waiting for another set-up to end"
    flock -w 1800 9 || fail "another set-up holds /run/atoll-setup.lock for half an hour: end it and run this again"
}

if [ ! -e "$image" ] && ! mountpoint -q "$pool"; then
    place=$(dirname "$pool")
    while [ ! -d "$place" ]; do place=$(dirname "$place"); done
    check_space "$place"
fi
set_up_rust
set_up_packages
set_up_pool
[ "$for_tests" = no ] || set_up_python
