#!/usr/bin/env bash
# Try the project on another Debian than this machine's: other compilers, another Python, another processor.
#
#   scripts/other_systems.sh make SUITE ARCH FOLDER      install it into FOLDER: some minutes, 1 GB
#   scripts/other_systems.sh run FOLDER 'COMMAND'        run a shell command there, in a clone of this checkout
#
#   scripts/other_systems.sh make sid amd64 /var/tmp/sid
#   scripts/other_systems.sh run /var/tmp/sid 'make test'
#
# SUITE is a release of Debian: sid has the newest compiler and Python, trixie and bookworm those of the last
# two stable releases. ARCH is one of Debian's names: amd64, or arm64, which qemu emulates on another
# processor, some ten times slower.
#
# `run` first brings the clone to this checkout's last commit; changes that are not committed stay here.
#
# Needs root and a Debian whose apt knows a mirror. Nothing outside of FOLDER changes, but for the packages
# that it installs here: debootstrap, and qemu for another processor.
set -euo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)

usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}

make_system() {  # SUITE ARCH FOLDER
  local suite=$1
  local arch=$2
  local folder=$3
  local here
  local mirror
  local packages=(debootstrap)
  here=$(dpkg --print-architecture)
  if [ "$arch" != "$here" ]; then packages+=(qemu-user-static binfmt-support); fi
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' | sed -n 1p)
  if [ -z "$mirror" ]; then
    echo "apt knows no mirror of Debian: add one to its sources, then run apt-get update." >&2
    exit 1
  fi
  if [ -e "$folder/root" ]; then
    echo "$folder is a system already: remove it, or name another folder." >&2
    exit 1
  fi

  apt-get install --yes --quiet=2 "${packages[@]}" > /dev/null
  if [ "$arch" != "$here" ] && ! mountpoint --quiet /proc/sys/fs/binfmt_misc; then
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    update-binfmts --enable
  fi
  debootstrap --arch="$arch" --variant=minbase \
    --include=python3,python3-venv,make,g++,clang,git,ca-certificates,procps "$suite" "$folder" "$mirror"

  # How this machine reaches the network: names, certificates of a proxy, the index of pip.
  cp /etc/resolv.conf /etc/hosts "$folder/etc/"
  cp --recursive --dereference --remove-destination /etc/ssl/certs "$folder/etc/ssl/"
  if [ -f /etc/pip.conf ]; then cp /etc/pip.conf "$folder/etc/"; fi
  git clone --quiet --no-hardlinks "$project" "$folder/root/dflash-mlx"
  run_command "$folder" 'python3 --version; gcc --version | head -1; uname --machine'
}

run_command() {  # FOLDER COMMAND
  local folder=$1
  local command=$2
  local clone=$folder/root/dflash-mlx
  git -C "$clone" fetch --quiet "$project" HEAD
  git -C "$clone" checkout --quiet --detach FETCH_HEAD
  # In a namespace of its own: the mounts end with the command.
  unshare --mount bash -c '
    mount --rbind /proc "$1/proc"
    mount --rbind /dev "$1/dev"
    exec chroot "$1" /usr/bin/env --ignore-environment HOME=/root PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 \
      TERM="${TERM:-dumb}" http_proxy="${http_proxy:-}" https_proxy="${https_proxy:-}" no_proxy="${no_proxy:-}" \
      bash -c "cd /root/dflash-mlx && $2"
  ' bash "$folder" "$command"
}

if [ $# = 4 ] && [ "$1" = make ]; then
  make_system "$2" "$3" "$4"
elif [ $# = 3 ] && [ "$1" = run ]; then
  run_command "$2" "$3"
else
  usage
fi
