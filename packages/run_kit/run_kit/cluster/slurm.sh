#!/bin/bash
#SBATCH --output=%x_%j.log
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@600
#
# plinth slurm submits this file: sbatch [OPTION ...] FILE PYTHON APP [key=value ...]; @JOB_ID@ becomes the job's number.
# SLURM sends SIGUSR1 to it 600 s before the time limit. The app then finishes its step, saves and exits with 138; the
# job is queued again and resumes. Variables, with their defaults, that the environment of sbatch may set:
max_requeues=${PLINTH_MAX_REQUEUES:-100}
ray_dir=${PLINTH_RAY_DIR:-/tmp} # on the node's own disk, with a short path: those of sockets have at most 107 characters
object_store_bytes=${PLINTH_OBJECT_STORE_BYTES:-1073741824}
start_timeout_s=${PLINTH_START_TIMEOUT_S:-600} # for all nodes to join Ray
eval "${PLINTH_SETUP-}"                        # shell lines, such as `module load cuda`
python=$1 && shift
app=("${@//@JOB_ID@/$SLURM_JOB_ID}")
app_pid=
asked=     # the first signal
passed_on= # whether the app has it

pass_on() { # a signal's name
    asked=${asked:-$1}
    interrupted=1
    [[ -n $app_pid ]] || return
    passed_on=1
    kill -s "$1" "$app_pid"
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM

# FOLDER OPTION ...: a node of Ray until SIGTERM. Its folder, token and free ports let several jobs share a host.
run_ray() {
    local folder=$1 stopped='' ray=''
    mkdir -m 700 "$folder" || return # refuses a folder that another user has put there
    trap 'stopped=1; [[ -z $ray ]] || kill "$ray"' TERM
    "$python" -m ray.scripts.scripts start --block --disable-usage-stats --temp-dir="$folder" "${@:2}" \
        --num-cpus="$cpus" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --object-store-memory="$object_store_bytes" \
        --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0 &>"$folder/ray_start.log" &
    ray=$!
    [[ -z $stopped ]] || kill "$ray" # the signal came while it was started
    wait "$ray"
    wait "$ray" # a signal ends the first one
    [[ -n $stopped ]] || { echo "error: Ray ended on $(hostname):" && tail -n 40 "$folder/ray_start.log"; } >&2
    rm -rf "$folder"
}

# Prints this node's address on the way to a host, and two of its ports that are free.
address_towards='import socket, sys
route, one, other = socket.socket(type=socket.SOCK_DGRAM), socket.socket(), socket.socket()
route.connect((sys.argv[1], 9))  # sends nothing
address = route.getsockname()[0]
one.bind((address, 0)), other.bind((address, 0))
print(address, one.getsockname()[1], other.getsockname()[1])'
# Prints how many nodes are in the cluster at an address; fails while the head is starting.
count_nodes='import ray, socket, sys
host, port = sys.argv[1].split(":")
socket.create_connection((host, int(port)), timeout=5).close()
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))'

wait_for_nodes() { # until all have joined; fails if a process that starts nodes has ended, or too late
    while ((${joined:-0} < ${#hosts[@]})); do
        for pid in "${ray_pids[@]}"; do kill -0 "$pid" 2>/dev/null || return; done
        ((SECONDS < start_timeout_s)) || return
        joined=$("$python" -c "$count_nodes" "$ip:$port" 2>/dev/null) || sleep 1
    done
}

# `ray symmetric-run` (2.60) does not serve here: it refuses a host on which another job runs Ray, its `ray stop` ends the
# Ray of that job as well, SIGUSR1 kills it, and it exits with 0 if Ray cannot start.
stop_ray() { kill "${ray_pids[@]}" && wait "${ray_pids[@]}"; } 2>/dev/null

if ((SLURM_JOB_NUM_NODES > 1)); then # Ray on every node: the head on this one, the others join it
    export python object_store_bytes cpus=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE} RAY_AUTH_MODE=token RAY_AUTH_TOKEN
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    others=$((${#hosts[@]} - 1))
    folder=$ray_dir/plinth_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}
    read -r ip port client_port < <("$python" -c "$address_towards" "${hosts[1]}") || exit 1
    run_ray "${folder}_head" --head --node-ip-address="$ip" --port="$port" --include-dashboard=false \
        --ray-client-server-port="$client_port" &
    ray_pids=($!)
    # The tasks have numbers of their own, because the nodes of a test share a disk.
    srun --nodes="$others" --ntasks="$others" --ntasks-per-node=1 --cpus-per-task="$cpus" --exclude="${hosts[0]}" \
        bash -c "$(declare -f run_ray); run_ray '${folder}_node'\$SLURM_PROCID --address=$ip:$port" &
    ray_pids+=($!)
    trap stop_ray EXIT
    wait_for_nodes || { echo "error: ${joined:-0} of ${#hosts[@]} nodes have joined Ray after $SECONDS s" >&2 && exit 1; }
    echo "Ray at $ip:$port: ${hosts[*]}"
    app+=(trainer.ray_address="$ip:$port")
fi
if [[ -z $asked ]]; then
    "$python" -m run_kit.commands "${app[@]}" &
    app_pid=$!
    [[ -z $asked || -n $passed_on ]] || pass_on "$asked"
    interrupted=1
    while [[ -n $interrupted ]]; do # a signal ends `wait` before the app has ended
        interrupted=
        wait "$app_pid"
        code=$?
    done
else
    code=$((128 + $(kill -l "$asked")))
fi
((code == 138)) || exit "$code"
((${SLURM_RESTART_COUNT:-0} < max_requeues)) || {
    echo "the time limit came before the last step, and the job has been queued again $max_requeues times" >&2 && exit "$code"
}
((SLURM_JOB_NUM_NODES == 1)) || stop_ray
echo "the time limit comes before the last step: queueing the job again"
scontrol requeue "$SLURM_JOB_ID" || exit "$code"
