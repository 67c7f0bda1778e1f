# First part of a host: its own root directory, an overlay of this machine's, and its name. Arguments: the host's
# directory, its name, the directory that all hosts share, the directory of the stand-ins.
set -eu
mount -t tmpfs -o size=64g tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
root=$1/root
hostname "$2"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/run"
mkdir -p "$root/run/sshd" "$root/srv/cluster" "$root/root/.ssh"
mount --bind "$3" "$root/srv/cluster"
cp "$4"/machine/* "$root/usr/local/sbin/"
# A process has the name of its file.
cp /bin/dash "$root/usr/local/sbin/systemd"
cp "$3/ssh/$2" "$root/etc/ssh/host_key"
cp "$3/ssh/user.pub" "$root/root/.ssh/authorized_keys"
chmod 700 "$root/root/.ssh"
cat >"$root/etc/ssh/sshd_of_test" <<CONFIG
HostKey /etc/ssh/host_key
AuthorizedKeysFile /root/.ssh/authorized_keys
PasswordAuthentication no
UsePAM no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
CONFIG
ip link set lo up
exec chroot "$root" /usr/local/sbin/systemd -c '/usr/sbin/sshd -f /etc/ssh/sshd_of_test -E /var/log/sshd.log
sleep infinity &
touch "/srv/cluster/up-$0"
wait' "$2"
