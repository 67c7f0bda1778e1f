# Makes this host a node of an RKE2 cluster, or removes it from the cluster. Runs as root, read from standard input,
# after assignments of these settings: node_name, role, version, config, audit_policy, registries, registry_ca,
# files_sha256, mirror, peers, is_first, nvidia_driver, token, agent_token.
# No secret is an argument of a program or part of the output. The provider prints the output of a failed command.
set -eu
umask 077
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C

CONFIG=/etc/rancher/rke2
DATA=/var/lib/rancher/rke2
MARK=/etc/rancher/cloister-host
INSTALLED=/etc/rancher/cloister-rke2-version
LOG=/var/log/cloister-host.log
ROOM_GIB=20
START_S=900

fail() { echo "$node_name: $*" >&2; exit 1; }
say() { echo "$node_name: $*" >&2; }

problem() { problems="${problems}
  $*"; }

# Everything that is wrong with the host is reported at once, before anything changes.
check_host() {
  problems=
  [ "$(uname -sm)" = "Linux x86_64" ] || problem "is $(uname -sm); RKE2's files are for Linux x86_64"
  [ "$(ps -p 1 -o comm=)" = systemd ] || problem "its first process is not systemd; RKE2 needs it"
  if [ -e "$MARK" ]; then
    [ "$(cat "$MARK")" = "$node_name" ] || problem "has joined as $(cat "$MARK"); keep that name, or remove it first"
  elif [ -e "$DATA" ] || [ -e "$CONFIG" ]; then
    problem "runs an RKE2 that is not of this stack; remove it with rke2-uninstall.sh, or name another host"
  else
    for port in $ports; do
      [ -z "$(ss -Hltn "sport = :$port")" ] || problem "port $port is in use; stop the program that listens there"
    done
  fi
  [ -z "$(swapon --noheadings)" ] || problem "swap is on; run swapoff -a and remove it from /etc/fstab"
  for module in overlay br_netfilter; do
    [ -d "/sys/module/$module" ] || modprobe --dry-run "$module" 2>/dev/null ||
      problem "the kernel lacks the module $module; install the complete kernel of the distribution"
  done
  [ "$(timedatectl show --property NTPSynchronized --value)" = yes ] ||
    problem "the clock is not synchronized; configure chrony or systemd-timesyncd"
  room_gib=$(($(df -Pk /var/lib | awk 'NR == 2 { print $4 }') / 1048576))
  [ -e "$INSTALLED" ] || [ "$room_gib" -ge "$ROOM_GIB" ] ||
    problem "/var/lib has $room_gib GiB free; it needs $ROOM_GIB GiB"
  if [ "$(getenforce 2>/dev/null || true)" = Enforcing ] && ! rpm --quiet -q rke2-selinux; then
    problem "SELinux is enforcing; install the package rke2-selinux"
  fi
  [ "$nvidia_driver" = 0 ] || check_nvidia
  [ -z "$problems" ] || fail "cannot join:$problems"
}

check_nvidia() {
  driver=$(sed -n 's/^NVRM version:.* \([0-9][0-9]*\)\.[0-9.]* .*/\1/p' /proc/driver/nvidia/version 2>/dev/null || true)
  if [ -z "$driver" ]; then
    problem "no NVIDIA driver is loaded; install one of version $nvidia_driver or newer"
  elif [ "$driver" -lt "$nvidia_driver" ]; then
    problem "the NVIDIA driver has version $driver; install $nvidia_driver or newer"
  fi
  [ -x /usr/bin/nvidia-container-runtime ] || [ -x /usr/local/nvidia/toolkit/nvidia-container-runtime ] ||
    problem "nvidia-container-runtime is missing; install NVIDIA's Container Toolkit"
}

# The files are in the home of the user who logs in, or come from the mirror.
verify_files() {
  files=$(getent passwd "${SUDO_USER:-root}" | cut -d: -f6)/.cloister-rke2/$version
  if [ -n "$mirror" ]; then
    mkdir -p "$files"
    printf '%s\n' "$files_sha256" | while read -r _ file; do
      printf '%s\n' "$files_sha256" | grep -F "  $file" | (cd "$files" && sha256sum --status --check -) 2>/dev/null ||
        curl --fail --silent --show-error --location --retry 3 --output "$files/$file" "$mirror/$file" </dev/null ||
        fail "$file cannot be downloaded from $mirror"
    done
  fi
  printf '%s\n' "$files_sha256" | (cd "$files" && sha256sum --quiet --strict --check -) >&2 ||
    fail "a file of RKE2 $version in $files differs from hosts.distribution.sha256; nothing was changed"
}

# A second cluster would start if a new server were the first of the list.
check_peers() {
  [ "$is_first" = yes ] && [ ! -e "$MARK" ] || return 0
  for peer in $peers; do
    if curl --insecure --silent --max-time 3 --output /dev/null "https://$peer:9345/cacerts" </dev/null; then
      fail "is the first server in hosts.machines, but a cluster runs on $peer; list new servers after it"
    fi
  done
}

# Writes standard input to a file, and sets `changed` if that is another content.
write() {
  cat >"$1.new"
  chmod "$2" "$1.new"
  if [ -e "$1" ] && cmp -s "$1" "$1.new"; then
    rm "$1.new"
  else
    mv "$1.new" "$1"
    changed=yes
  fi
}

# The first server makes up a token once. The others get the cluster's, with the digest of its certificate.
write_token() {
  if [ -n "$2" ]; then
    printf '%s\n' "$2" | write "$1" 0600
  elif [ ! -s "$1" ]; then
    od -An -tx1 -N32 /dev/urandom | tr -d ' \n' | write "$1" 0600
  fi
}

write_configuration() {
  mkdir -p -m 0700 "$CONFIG"
  printf '%s\n' "$node_name" >"$MARK"
  [ "$(getenforce 2>/dev/null || true)" != Enforcing ] || config="${config}selinux: true"
  printf '%s\n' "$config" | write "$CONFIG/config.yaml" 0600
  if [ "$role" = server ]; then
    printf '%s\n' "$audit_policy" | write "$CONFIG/audit-policy.yaml" 0600
    write_token "$CONFIG/token" "$token"
    write_token "$CONFIG/agent-token" "$agent_token"
  else
    write_token "$CONFIG/token" "$agent_token"
  fi
  [ -z "$registry_ca" ] || printf '%s\n' "$registry_ca" | write "$CONFIG/registry-ca.crt" 0644
  if [ -n "$registries" ]; then
    printf '%s\n' "$registries" | write "$CONFIG/registries.yaml" 0600
  elif [ -e "$CONFIG/registries.yaml" ]; then
    rm "$CONFIG/registries.yaml"
    changed=yes
  fi
  # Source: https://docs.rke2.io/known_issues, "NetworkManager".
  if [ -d /etc/NetworkManager/conf.d ] && [ ! -e /etc/NetworkManager/conf.d/rke2-canal.conf ]; then
    printf '[keyfile]\nunmanaged-devices=interface-name:flannel*;interface-name:cali*;interface-name:tunl*;%s\n' \
      'interface-name:vxlan.calico;interface-name:vxlan-v6.calico;interface-name:wireguard.cali;interface-name:wg-v6.cali' \
      >/etc/NetworkManager/conf.d/rke2-canal.conf
    chmod 0644 /etc/NetworkManager/conf.d/rke2-canal.conf
    systemctl reload NetworkManager || true
  fi
}

install_rke2() {
  [ "$(cat "$INSTALLED" 2>/dev/null || true)" != "$version" ] || return 0
  mkdir -p "$DATA/agent/images"
  for archive in "$files"/rke2-images-*; do
    cp "$archive" "$DATA/agent/images/"
  done
  # The installer is one of the verified files. It leaves a running RKE2 alone.
  INSTALL_RKE2_TYPE=$role INSTALL_RKE2_METHOD=tar INSTALL_RKE2_ARTIFACT_PATH=$files INSTALL_RKE2_TAR_PREFIX=/usr/local \
    sh "$files/install.sh" >>"$LOG" 2>&1 </dev/null || fail "RKE2's installer failed; its output is in $LOG"
  # Required by the profile `cis`: https://docs.rke2.io/security/hardening_guide.
  install -m 0644 /usr/local/share/rke2/rke2-cis-sysctl.conf /etc/sysctl.d/60-rke2-cis.conf
  sysctl -q -p /etc/sysctl.d/60-rke2-cis.conf
  if [ "$role" = server ]; then
    getent passwd etcd >/dev/null || useradd -r -c "etcd user" -s /sbin/nologin -M etcd -U
  fi
  printf '%s\n' "$version" >"$INSTALLED"
  changed=yes
}

start_rke2() {
  systemctl enable --quiet "rke2-$role"
  if [ "$changed" = yes ] || ! systemctl is-active --quiet "rke2-$role"; then
    say "starting RKE2 $version"
    # The unit itself has no time limit.
    timeout "$START_S" systemctl restart "rke2-$role" </dev/null ||
      fail "rke2-$role does not start within $START_S s; see journalctl -u rke2-$role"
  fi
  [ "$role" = server ] || return 0
  end=$(($(date +%s) + START_S))
  until "$DATA/bin/kubectl" --kubeconfig "$CONFIG/rke2.yaml" get --raw /readyz >/dev/null 2>&1 </dev/null; do
    [ "$(date +%s)" -lt "$end" ] || fail "the API server is not ready after $START_S s; see journalctl -u rke2-server"
    sleep 1
  done
}

join() {
  changed=no
  ports=10250
  [ "$role" = agent ] || ports="6443 9345 2379 2380 10250"
  check_host
  check_peers
  [ "$(cat "$INSTALLED" 2>/dev/null || true)" = "$version" ] || verify_files
  write_configuration
  install_rke2
  start_rke2
  say "RKE2 $version runs"
}

update() {
  [ -e "$MARK" ] || fail "this machine never joined; a new machine needs a new name in hosts.machines"
  join
}

remove() {
  [ -e "$MARK" ] || return 0
  [ "$(cat "$MARK")" = "$node_name" ] || fail "has joined as $(cat "$MARK"); nothing was removed"
  if [ -x /usr/local/bin/rke2-uninstall.sh ]; then
    /usr/local/bin/rke2-uninstall.sh >>"$LOG" 2>&1 </dev/null || fail "rke2-uninstall.sh failed; its output is in $LOG"
  fi
  rm -rf "$CONFIG" "$DATA" /etc/sysctl.d/60-rke2-cis.conf /etc/NetworkManager/conf.d/rke2-canal.conf
  rm -rf "$(getent passwd "${SUDO_USER:-root}" | cut -d: -f6)/.cloister-rke2" "$INSTALLED" "$MARK"
  say "RKE2 is removed"
}

main() {
  case $1 in
    join | update | remove) "$1" ;;
    token) cat "$DATA/server/token" ;;
    agent-token) cat "$DATA/server/agent-token" ;;
    kubeconfig) cat "$CONFIG/rke2.yaml" ;;
  esac
}

main "$1"
exit
