#!/usr/bin/env bash
# Runs a command inside a SLURM cluster of one node that it starts on this machine and stops.
#
#     tests/launched/slurm.sh python -m pytest tests/launched/test_slurm.py
#
# Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. Everything that
# the daemons write is in a temporary folder; nothing of a SLURM that is installed is touched.
set -euo pipefail

for program in slurmctld slurmd munged srun; do
    command -v "$program" >/dev/null || { echo "slurm.sh: $program is not installed" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "slurm.sh: slurmd starts jobs as their users, so be root" >&2; exit 2; }

place=$(mktemp -d /tmp/fxtrain-slurm-XXXXXX)
chmod 755 "$place"
pids=()
stop() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for _ in $(seq 30); do
        kill -0 "${pids[@]}" 2>/dev/null || break
        sleep 0.1
    done
    for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
    wait
    rm -rf "$place"
}
trap stop EXIT

host=$(hostname -s)
mkdir -p "$place/state" "$place/spool"
dd if=/dev/urandom of="$place/munge.key" bs=1024 count=1 status=none
chmod 600 "$place/munge.key"
cat >"$place/slurm.conf" <<CONF
ClusterName=fxtrain
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job goes back into the queue for as long as a credential counts, by default two minutes.
AuthInfo=socket=$place/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmctldPort=${SLURMCTLD_PORT:-16817}
SlurmdPort=${SLURMD_PORT:-16818}
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/spool
SlurmctldPidFile=$place/slurmctld.pid
SlurmdPidFile=$place/slurmd.pid
SlurmctldLogFile=$place/slurmctld.log
SlurmdLogFile=$place/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
InactiveLimit=0
KillWait=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc --all) State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF="$place/slurm.conf"

munged --foreground --force --socket="$place/munge.socket" --key-file="$place/munge.key" \
    --pid-file="$place/munged.pid" --log-file="$place/munged.log" --seed-file="$place/munge.seed" \
    --num-threads=2 >"$place/munged.out" 2>&1 &
pids+=($!)
for _ in $(seq 50); do [ -S "$place/munge.socket" ] && break; sleep 0.1; done
slurmctld -D -f "$SLURM_CONF" >"$place/slurmctld.out" 2>&1 &
pids+=($!)
for _ in $(seq 100); do scontrol ping 2>/dev/null | grep -q UP && break; sleep 0.1; done
slurmd -D -f "$SLURM_CONF" -N "$host" >"$place/slurmd.out" 2>&1 &
pids+=($!)

for _ in $(seq 100); do
    sinfo --noheader --format=%T 2>/dev/null | grep -qx 'idle *' && ready=1 && break
    sleep 0.3
done
if [ -z "${ready:-}" ]; then
    echo "slurm.sh: the node did not come up" >&2
    tail -n 20 "$place"/*.log "$place"/*.out >&2 || true
    exit 2
fi

"$@"
