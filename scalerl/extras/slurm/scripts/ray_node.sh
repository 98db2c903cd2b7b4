#!/bin/bash
# What ray.sbatch runs on a node:
#     ray_node.sh head | worker | run COMMAND ... | preflight | python ... | clean | guard JOB HEAD ATTEMPT | ip HOST
set -uo pipefail

GUARD_EVERY_S=10

fail() { echo "ray_node.sh on $(hostname): $*" >&2; exit 70; }

# "INTERFACE ADDRESS" of SCALERL_INTERFACE, which is a name (ib0) or the beginning of an address (10.1.).
interface_and_address() {
  local found
  found=$(ip -o -4 addr show 2>/dev/null | awk -v wanted="$SCALERL_INTERFACE" \
    '{sub("/.*", "", $4); if ($2 == wanted || (wanted ~ /^[0-9]+\./ && index($4, wanted) == 1)) {print $2, $4; exit}}')
  [[ -n $found ]] || fail "no IPv4 address for SCALERL_INTERFACE=$SCALERL_INTERFACE; there are: $(ip -o -4 addr show | awk '{printf "%s %s  ", $2, $4}')"
  echo "$found"
}

# This node's address: of SCALERL_INTERFACE when set, else what its name resolves to (never the loopback that some
# distributions put into /etc/hosts).
node_ip() {
  local ip
  if [[ -n ${SCALERL_INTERFACE:-} ]]; then
    ip=$(interface_and_address) || exit
    ip=${ip#* }
  else
    ip=$(getent ahostsv4 "$1" | awk '$1 !~ /^127\./ {print $1; exit}')
    [[ -n $ip ]] || fail "the name $1 has no IPv4 address but loopback: set SCALERL_INTERFACE to the network interface to use"
  fi
  echo "$ip"
}

# NCCL and gloo take the network that Ray takes; its interface may have another name on each node.
use_interface() {
  local name
  [[ -n ${SCALERL_INTERFACE:-} ]] || return 0
  name=$(interface_and_address) || exit
  name=${name% *}
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$name} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$name}
}

# The number of GPUs that Slurm gave; on sites without GRES, that the driver shows.
gpus() {
  if [[ -n ${SCALERL_GPUS_PER_NODE:-} ]]; then echo "$SCALERL_GPUS_PER_NODE"
  elif [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then echo "$SLURM_GPUS_ON_NODE"
  elif [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .
  elif command -v nvidia-smi >/dev/null; then nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU'
  else echo 0; fi
}

# Ranks of this step must not be taken for ranks of the training: Megatron and torch read these.
leave_slurm() {
  local name
  for name in $(compgen -e); do
    case $name in SLURM_* | SLURMD_* | SRUN_* | PMI_* | PMIX_* | PMI2_* | OMPI_* | MPI_*) unset "$name" ;; esac
  done
}

enter_venv() {
  [[ -x $SCALERL_VENV/bin/python ]] || fail "no $SCALERL_VENV/bin/python here: SCALERL_VENV must be on a file system that all nodes share"
  export VIRTUAL_ENV=$SCALERL_VENV PATH=$SCALERL_VENV/bin:$PATH
}

port_holder() { ss -Hltnp "sport = :$1" 2>/dev/null | sed -n 's/.*users:((\(.*\)))/\1/p' | head -1; }
port_is_taken() { [[ -n $(ss -Hltn "sport = :$1" 2>/dev/null) ]]; }

# PORTS: options of `ray start` with all of Ray's ports of this node, below those that the kernel gives to connections: one of
# them may have any of the latter at any time. The head's own is chosen by ray.sbatch.
RAY_PORT_OPTIONS=(node-manager-port object-manager-port runtime-env-agent-port dashboard-agent-grpc-port
  dashboard-agent-listen-port metrics-export-port)
plan_ports() {
  local port=${SCALERL_RAY_NODE_PORT:-6400} given option first last
  given=$(cut -f1 /proc/sys/net/ipv4/ip_local_port_range)
  PORTS=()
  command -v ss >/dev/null || echo "there is no ss (iproute2) here: whether a port is taken is not looked at"
  for option in "${RAY_PORT_OPTIONS[@]}"; do
    while ((port == ${SCALERL_RAY_ADDRESS##*:})) || port_is_taken "$port"; do
      ((port == ${SCALERL_RAY_ADDRESS##*:})) || echo "port $port is taken by $(port_holder "$port" | grep . || echo "a process that is not yours")"
      port=$((port + 1))
    done
    PORTS+=("--$option=$port")
    port=$((port + 1))
  done
  last=$((given > 20000 ? 19999 : given - 1))
  first=$((last > 16500 ? last - 9997 : 6500))
  # A kernel that gives away nearly all of them leaves no choice.
  ((last - first >= 1000)) || { first=10002 last=19999; echo "Ray's workers take ports that the kernel gives to connections, too ($given and above): see net.ipv4.ip_local_port_range"; }
  PORTS+=("--min-worker-port=$first" "--max-worker-port=$last")
}

# What an attempt that Slurm killed before it was done has left here.
clean_earlier() {
  local note session
  for note in "${SCALERL_ATTEMPT_DIR%/*}"/attempt_*/.ray_session; do
    [[ -s $note && $note != "$SCALERL_ATTEMPT_DIR"/* ]] || continue
    session=$(cat "$note")
    if [[ $session == */session_* && -d $session ]]; then rm -rf "$session"; fi
  done
}

# It and all below it, while they are still below it. Each stands still first, so that none starts another. Those that watch
# a server end by themselves when nothing is above them, with the server and its files in /dev/shm.
end_with_all_below() { # end_with_all_below PID
  local what pid found=" " watching=() tries more=1
  while [[ -n $more ]]; do
    more=
    while read -r what pid; do
      [[ $found != *" $pid "* ]] || continue
      if [[ $what == watching ]]; then watching+=("$pid"); else kill -STOP "$pid" 2>/dev/null; more=1; fi
      found+="$pid "
    done < <(processes_below "$1")
  done
  for pid in $found; do [[ " ${watching[*]-} " == *" $pid "* ]] || kill -KILL "$pid" 2>/dev/null; done
  for ((tries = 0; tries < 50; tries++)); do
    ((${#watching[@]} > 0)) && kill -0 "${watching[@]}" 2>/dev/null || break
    sleep 0.2
  done
}
processes_below() { # processes_below PID: "ends N" or "watching N" for each, PID among them, but none below those that watch
  local watching
  watching=$(grep -las 'scalerl[.]rollout[.]servers[.]supervise' /proc/[0-9]*/cmdline | awk -F/ '{printf "%s ", $3}')
  cat /proc/[0-9]*/status 2>/dev/null | awk -v root="$1" -v watching="$watching" '
    BEGIN {split(watching, pids, " "); for (i in pids) watches[pids[i]]}
    /^Pid:/ {pid = $2}
    /^PPid:/ {parent[pid] = $2}
    END {
      for (pid in parent) {
        first = ""
        for (above = pid; above != root && above in parent; above = parent[above]) if (above in watches) first = above
        if (above != root) continue
        if (first == "") print "ends", pid
        else if (first == pid) print "watching", pid
      }
    }'
}

# The launcher is where the head is. Lost with its node it takes Ray's files off no other.
head_is_gone() { # not reached three times, which takes 11 seconds at most
  local tries
  for ((tries = 0; tries < 3; tries++)); do
    ((tries == 0)) || sleep 1
    ! timeout 3 bash -c "exec 3<>/dev/tcp/${SCALERL_RAY_ADDRESS/://}" 2>/dev/null || return 1
  done
}
# From TERM on. Slurm ends the job because of a lost node, or for another reason, and then the launcher says what happens.
end_when_alone() { # end_when_alone HOST
  trap '' TERM USR2
  while kill -0 "$$" 2>/dev/null; do
    if head_is_gone; then
      echo "$1: Slurm ends this job, and its head at $SCALERL_RAY_ADDRESS does not answer: Ray ends here, too"
      kill -USR2 "$$"
      return
    fi
    sleep 2
  done
}

start_ray() { # start_ray OPTION ...
  local name=${SLURMD_NODENAME:-$(hostname -s)} ip num_gpus cpus memory code topology extra=()
  ip=$(node_ip "$name") || exit
  num_gpus=$(gpus)
  cpus=${SCALERL_CPUS_PER_NODE:-${SLURM_CPUS_ON_NODE:-$(nproc)}}
  # Without a number Ray takes what is free, and refuses where that is little; no actor asks for memory.
  memory=$(($(awk '/^MemTotal:/ {print $2}' /proc/meminfo) * 1024))
  [[ -r $RAY_AUTH_TOKEN_PATH ]] || fail "cannot read $RAY_AUTH_TOKEN_PATH: set SCALERL_LOG_DIR to a folder that all nodes share"
  read -ra extra <<<"${SCALERL_RAY_ARGS:-}"
  use_interface
  # Where the node is in the network, from the outermost switch inwards: by that the nodes of a pool are ordered.
  topology=$(tr -c 'A-Za-z0-9_.\n' - <<<"${SLURM_TOPOLOGY_ADDR:-}")
  [[ -z $topology ]] || ((${#topology} > 63)) || extra+=(--labels "scalerl-topology=$topology")
  enter_venv
  leave_slurm
  ulimit -n "$(ulimit -Hn)"
  echo "$name: ip $ip, $cpus CPUs, $num_gpus GPUs, $(python --version), $SCALERL_VENV"
  clean_earlier
  plan_ports
  echo "ports: ${PORTS[*]#--}"
  # What the ranks' collectives are told, wherever it was set.
  env | grep -E '^(NCCL|GLOO|TORCH_NCCL)_' | sort
  # Slurm sends TERM to all steps when it cancels or preempts. The command is to save then, with a cluster that is whole:
  # Ray and all below it hold TERM back, and end by KILL when the step ends.
  trap '' TERM
  local ray='' began note='' alone=
  [[ $1 != --head ]] || note=note_session
  # It is repeated, and must not end what cleans up. A session that has only just begun is noted first, and nothing of Ray
  # is left that could write there.
  trap 'trap "" USR2 TERM; if [[ -n $ray ]]; then end_with_all_below "$ray"; wait "$ray"; [[ -z $note ]] || $note "$ray" "$began"; fi; clean; exit 0' USR2
  began=$(date +%F_%H-%M-%S)
  python -c 'import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])' \
    "$SCALERL_VENV/bin/ray" start --block --node-ip-address="$ip" --node-name="$name" --num-cpus="$cpus" \
    --num-gpus="$num_gpus" --memory="$memory" --disable-usage-stats "${PORTS[@]}" "$@" ${extra[@]+"${extra[@]}"} &
  ray=$!
  [[ -z $note ]] || $note "$ray" "$began" &
  # Only now: Ray is to inherit that TERM is ignored. It interrupts the wait.
  [[ $1 == --head ]] || trap '[[ -n $alone ]] || { alone=1; end_when_alone "$name" & }' TERM
  while wait "$ray"; code=$?; ((code > 128)) && kill -0 "$ray" 2>/dev/null; do :; done
  trap '' TERM
  note_end "$name" "$code"
  # USR2 would clean a second time.
  if [[ $1 != --head ]] && head_is_gone; then trap '' USR2; clean; fi
  exit $code
}

note_end() { # note_end NAME CODE: that Ray is no longer up on this node, by which the launcher knows
  # The launcher renames the note of a node without which the command goes on: a second one would be of another end.
  [[ -e $SCALERL_ATTEMPT_DIR/.ended-$1 || -e $SCALERL_ATTEMPT_DIR/.lost-$1 ]] || echo "$(date +%s%N) $1 $2" >"$SCALERL_ATTEMPT_DIR/.ended-$1"
}

note_session() { # note_session PID BEGAN: the session of the head's Ray process, long before the cluster is ready
  local path alive=1 directory=${RAY_TMPDIR:-${TMPDIR:-/tmp}} # as Ray chooses it
  while [[ -n $alive ]]; do
    # Looked for once more after it has ended.
    kill -0 "$1" 2>/dev/null || alive=
    for path in "$directory"/ray/session_*_"$1"; do
      # Older ones are of other processes that had the same number.
      [[ -d $path && ! ${path##*/} < session_$2 ]] || continue
      [[ -s $SCALERL_ATTEMPT_DIR/.ray_session ]] || echo "$path" >"$SCALERL_ATTEMPT_DIR/.ray_session"
      return
    done
    [[ -z $alive ]] || sleep 0.2
  done
}

clean() { # keep Ray's logs of a failed attempt, remove this attempt's session and nothing else
  local session tries name=${SLURMD_NODENAME:-$(hostname -s)}
  session=$(cat "$SCALERL_ATTEMPT_DIR/.ray_session" 2>/dev/null)
  [[ $session == */session_* && -d $session ]] || return 0
  if [[ $(cat "$SCALERL_ATTEMPT_DIR/.end_code" 2>/dev/null) != 0 ]]; then mkdir -p "$SCALERL_ATTEMPT_DIR/ray" && cp -r "$session/logs" "$SCALERL_ATTEMPT_DIR/ray/$name"; fi
  # The processes that write there are being killed at the same time.
  for ((tries = 0; tries < 100; tries++)); do rm -rf "$session" 2>/dev/null && break; sleep 0.1; done
}

# A job with --no-kill goes on when the node of its batch script fails, with nothing that would ever end it.
guard() { # guard JOB HEAD ATTEMPT: requeues the job once Slurm has taken its head from it
  local nodes wait_s=$((GUARD_EVERY_S * SLURM_STEP_NUM_NODES)) never
  trap '' USR2
  # Nothing ever comes here. To wait without a process, which would be left on the node when this one is ended.
  exec {never}<> <(:)
  # Together the nodes ask Slurm every GUARD_EVERY_S seconds, however many they are.
  read -rt $((GUARD_EVERY_S * SLURM_NODEID)) -u "$never"
  while :; do
    read -rt "$wait_s" -u "$never"
    [[ $(scontrol -o show job "$1" 2>/dev/null) =~ \ JobState=RUNNING\ .*\ Restarts=$3\ .*\ NodeList=([^ ]+)\  ]] || continue
    nodes=$(scontrol show hostnames "${BASH_REMATCH[1]}") && [[ -n $nodes ]] || continue
    if ! grep -qx "$2" <<<"$nodes"; then
      echo "$(date '+%F %T') $2, where the launcher was, is no longer in job $1: requeue"
      # Ray ends, and takes its files with it; Slurm would wait until it kills it.
      scancel --signal=USR2 "$1" && sleep 3
      scontrol requeue "$1"
    fi
  done
}

mode=$1
shift
case $mode in
  head)
    # The batch script's own environment counts wrongly under --exclusive; a step's does not. Every node must offer as many.
    gpus >"$SCALERL_ATTEMPT_DIR/.head_gpus"
    start_ray --head --port="${SCALERL_RAY_ADDRESS##*:}" --include-dashboard=false
    ;;
  worker)
    # Also when it could not start Ray: the step goes on on the other nodes, so that its end would not say so.
    trap 'code=$?; ((code == 0)) || note_end "${SLURMD_NODENAME:-$(hostname -s)}" "$code"' EXIT
    start_ray --address="$SCALERL_RAY_ADDRESS"
    ;;
  run)
    enter_venv
    leave_slurm
    export RAY_ADDRESS=$SCALERL_RAY_ADDRESS
    # Until the command listens a notice must not end it.
    trap '' USR1
    echo $$ >"$SCALERL_ATTEMPT_DIR/.command_pid"
    exec "$@"
    ;;
  preflight)
    host=${SLURMD_NODENAME:-$(hostname -s)}
    # A probe that fails is not waited for.
    trap '(($? == 0)) || touch "$SCALERL_ATTEMPT_DIR/preflight/ended-$host"' EXIT
    # The bandwidth is that of the ranks' network, and a node without that network is not fit.
    use_interface
    arguments=(--head "$SCALERL_PREFLIGHT_ADDRESS" --host "$host" --gpus "$(gpus)" --min-gpus "${SCALERL_MIN_GPUS:-0}")
    [[ -z ${SCALERL_NEEDS:-} ]] || arguments+=(--needs "$SCALERL_NEEDS")
    [[ -z ${SCALERL_MIN_DISK_GIB:-} ]] || arguments+=(--min-disk-gib "$SCALERL_MIN_DISK_GIB")
    [[ -z ${SCALERL_MIN_SHM_GIB:-} ]] || arguments+=(--min-shm-gib "$SCALERL_MIN_SHM_GIB")
    enter_venv
    python -m scalerl.extras.slurm.preflight --directory "$SCALERL_ATTEMPT_DIR/preflight" \
      --timeout-s "${SCALERL_PREFLIGHT_TIMEOUT_S:-120}" probe "${arguments[@]}"
    ;;
  python)
    enter_venv
    exec python "$@"
    ;;
  clean) clean ;;
  guard) guard "$@" ;;
  ip) node_ip "$1" ;;
  *) fail "unknown mode $mode" ;;
esac
