#!/bin/sh
# What MPI's launcher calls in place of ssh, with a host and a command: the second namespace has both.
shift
exec ip netns exec moec-host1 unshare --uts sh -c 'hostname moec-host1; exec sh -c "$0"' "$*"
