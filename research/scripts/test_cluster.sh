#!/usr/bin/env bash
# A temporary SLURM cluster on this machine, for tests: munge, slurmctld and NODES x slurmd on loopback, as root.
#
#   test_cluster.sh up        start; prints the line to evaluate:  export SLURM_CONF=...
#   test_cluster.sh revive N  start the daemon of node N again after it was killed; the node takes jobs as before
#   test_cluster.sh down      stop what was started here (by process id) and remove the folder
#   test_cluster.sh install   Debian's packages (munge slurmctld slurmd slurm-client slurmdbd mariadb-server)
#
#   CLUSTER_ROOT  folder for everything (required)
#   NODES=2 CPUS=2 ACCOUNTING=0 (1: mariadb and slurmdbd, so that sacct answers) PORT_BASE=17600
#
# A requeued job may start again after cred_expire seconds (SLURM's default is 120). The other limits are long: on a
# loaded machine a daemon answers late, and that is no fault. FirstJobId is another one for each block of ports, because
# ranks of a job meet at a port that is made of its id, and another cluster of this machine may have such a job too.
# Does not touch /etc/slurm or the system's munge. Needs no systemd and no cgroups; nodes are simulated, so memory
# and CPU limits are not enforced.
set -euo pipefail

NODES=${NODES:-2} CPUS=${CPUS:-2} ACCOUNTING=${ACCOUNTING:-0} PORT_BASE=${PORT_BASE:-17600}
HOST=$(hostname -s)

install() {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        munge slurmctld slurmd slurm-client slurmdbd mariadb-server >/dev/null
}

check_programs() {
    local program
    for program in munged slurmctld slurmd sbatch $([ "$ACCOUNTING" = 1 ] && echo slurmdbd mariadbd); do
        PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || { echo "no $program here; run: $0 install" >&2; return 1; }
    done
}

wait_for() { # seconds, command
    local end=$((SECONDS + $1)); shift
    until timeout 5 "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || { echo "gave up waiting for: $*" >&2; tail -n 5 "$CLUSTER_ROOT"/log/*.log >&2; return 1; }
        sleep 0.1
    done
}

start() { # name, command: starts it in its own session and records its process id
    local name=$1; shift
    setsid "$@" >>"$CLUSTER_ROOT/log/$name.log" 2>&1 </dev/null &
    echo "$! $(basename "$1")" >"$CLUSTER_ROOT/pids/$name"
}

stop() { # name: TERM, then KILL after ten seconds; only if the process is still the program that was started
    local file=$CLUSTER_ROOT/pids/$1 pid program
    [ -f "$file" ] || return 0
    read -r pid program <"$file"
    rm -f "$file"
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "${program:0:15}" ] || return 0
    kill -TERM "$pid" 2>/dev/null || return 0
    for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || return 0; sleep 0.1; done
    kill -KILL "$pid" 2>/dev/null || true
}

write_slurm_conf() {
    local storage="AccountingStorageType=accounting_storage/none"
    if [ "$ACCOUNTING" = 1 ]; then
        storage="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT_BASE + 1))
AccountingStoragePass=$CLUSTER_ROOT/munge.socket"
    fi
    : >"$CLUSTER_ROOT/plugstack.conf"
    cat >"$CLUSTER_ROOT/slurm.conf" <<CONF
ClusterName=throwaway
SlurmctldHost=$HOST(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$CLUSTER_ROOT/munge.socket,cred_expire=20
CredType=cred/munge
SlurmctldPort=$PORT_BASE
SrunPortRange=$((PORT_BASE + 100))-$((PORT_BASE + 199))
SlurmctldPidFile=$CLUSTER_ROOT/slurmctld.pid
SlurmdPidFile=$CLUSTER_ROOT/slurmd-%n.pid
StateSaveLocation=$CLUSTER_ROOT/state
SlurmdSpoolDir=$CLUSTER_ROOT/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
MinJobAge=3600
KillWait=20
MaxArraySize=2001
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=120
FirstJobId=$((1 + PORT_BASE / 200 % 70 * 28))
PlugStackConfig=$CLUSTER_ROOT/plugstack.conf
$storage
CONF
    for n in $(seq "$NODES"); do
        echo "NodeName=n$n NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$((PORT_BASE + 10 + n)) CPUs=$CPUS Sockets=1" \
            "CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN"
    done >>"$CLUSTER_ROOT/slurm.conf"
    # Jobs in urgent preempt jobs in main, which have a grace period to save a checkpoint.
    cat >>"$CLUSTER_ROOT/slurm.conf" <<CONF
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 DefaultTime=10 State=UP PriorityTier=10 PreemptMode=OFF
CONF
}

start_accounting() {
    local port=$((PORT_BASE + 2)) data=$CLUSTER_ROOT/mysql socket=$CLUSTER_ROOT/mysql.sock
    mariadb-install-db --no-defaults --user=root --datadir="$data" --auth-root-authentication-method=socket \
        --skip-test-db >"$CLUSTER_ROOT/log/mysql-install.log" 2>&1
    start mariadbd mariadbd --no-defaults --user=root --datadir="$data" --socket="$socket" --port=$port \
        --bind-address=127.0.0.1 --innodb-buffer-pool-size=64M --pid-file="$CLUSTER_ROOT/mariadbd.pid"
    wait_for 60 mariadb --no-defaults -S "$socket" -e 'select 1'
    mariadb --no-defaults -S "$socket" -e "create database slurm_acct_db;
        create user slurm@localhost identified by 'slurm'; grant all on slurm_acct_db.* to slurm@localhost;
        create user slurm@'127.0.0.1' identified by 'slurm'; grant all on slurm_acct_db.* to slurm@'127.0.0.1';"
    cat >"$CLUSTER_ROOT/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$CLUSTER_ROOT/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((PORT_BASE + 1))
SlurmUser=root
PidFile=$CLUSTER_ROOT/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$port
StorageUser=slurm
StoragePass=slurm
CONF
    chmod 600 "$CLUSTER_ROOT/slurmdbd.conf"
    start slurmdbd slurmdbd -D
    wait_for 30 sacctmgr -n show cluster
    sacctmgr -i add cluster throwaway >/dev/null 2>&1 || true
}

nodes_up() { [ "$(sinfo --partition=main -h -N -o %t | grep -cE '^(idle|mix|alloc)$')" = "$NODES" ]; }

up() {
    check_programs
    mkdir -p "$CLUSTER_ROOT"/{log,pids,state,mysql}
    for n in $(seq "$NODES"); do mkdir -p "$CLUSTER_ROOT/spool-n$n"; done
    dd if=/dev/urandom of="$CLUSTER_ROOT/munge.key" bs=128 count=1 status=none
    chmod 400 "$CLUSTER_ROOT/munge.key"
    write_slurm_conf
    start munged munged --foreground --force --key-file="$CLUSTER_ROOT/munge.key" --seed-file="$CLUSTER_ROOT/munge.seed" \
        --socket="$CLUSTER_ROOT/munge.socket" --pid-file="$CLUSTER_ROOT/munged.pid" --log-file="$CLUSTER_ROOT/log/munge.log"
    wait_for 10 munge -S "$CLUSTER_ROOT/munge.socket" -n
    [ "$ACCOUNTING" = 1 ] && start_accounting
    start slurmctld slurmctld -D
    for n in $(seq "$NODES"); do start "slurmd-n$n" slurmd -D -N "n$n"; done
    wait_for 20 scontrol ping
    export -f nodes_up; export NODES
    wait_for 30 bash -c nodes_up
    echo "export SLURM_CONF=$SLURM_CONF"
}

revive() { # node: ReturnToService=2 takes it back once its daemon registers, for whatever reason it was down
    stop "slurmd-$1"
    start "slurmd-$1" slurmd -D -N "$1"
    export -f nodes_up; export NODES
    wait_for 60 bash -c nodes_up
}

down() {
    if [ -f "$CLUSTER_ROOT/pids/slurmctld" ]; then
        timeout 20 scancel --user=root 2>/dev/null || true
        for _ in $(seq 100); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
    fi
    for n in $(seq "$NODES"); do stop "slurmd-n$n"; done
    for name in slurmctld slurmdbd mariadbd munged; do stop "$name"; done
    rm -rf "$CLUSTER_ROOT"
}

PATH=$PATH:/usr/sbin
case "${1:-}" in
    install) install; exit ;;
    up | down | revive) ;;
    *) sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
: "${CLUSTER_ROOT:?set it to a folder for the files of the cluster}"
CLUSTER_ROOT=$(realpath -m "$CLUSTER_ROOT")
export SLURM_CONF=$CLUSTER_ROOT/slurm.conf
"$@"
