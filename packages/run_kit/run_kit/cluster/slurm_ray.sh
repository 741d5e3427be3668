
# Ray on every node: the head on this one, the others join it.
export NUM_CPUS=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE} NUM_GPUS=@gpus_per_node@ OBJECT_STORE_BYTES=@object_store_bytes@
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
ray_node=("$python" -m run_kit.cluster.ray_node)
ray_folder=@temp_dir@/plinth_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
others=$((${#hosts[@]} - 1))
address=$("${ray_node[@]}" address "${hosts[1]}") || exit 1
app+=(@address_key@="$address")

"${ray_node[@]}" head "$address" "${ray_folder}_head" &
ray_pids=($!)
srun --nodes="$others" --ntasks="$others" --ntasks-per-node=1 --cpus-per-task="$NUM_CPUS" --exclude="${hosts[0]}" \
    "${ray_node[@]}" worker "$address" "${ray_folder}_node" &
ray_pids+=($!)

stop_ray() {
    kill "${ray_pids[@]}" 2>/dev/null
    wait "${ray_pids[@]}"
}
trap stop_ray EXIT
"${ray_node[@]}" wait "$address" "${#hosts[@]}" @start_timeout_s@ "${ray_pids[@]}" || exit 1
