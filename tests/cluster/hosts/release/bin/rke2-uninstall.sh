#!/bin/sh
set -eu
echo "uninstall $(hostname)" >>/srv/cluster/log
kill "$(cat /run/rke2.pid)" || true
rm -f /run/rke2.* /usr/local/bin/rke2
