#!/bin/bash
@options@
#
# Written by: @command@
# SLURM sends SIGUSR1 to this script @stop_before_s@ s before the time limit, and the script sends it to the app, which
# @then@
set -u
@setup@
python=@python@
app=(
@app@
)
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
@ray@
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

restarts=${SLURM_RESTART_COUNT:-0}
if ((code != @stopped@)); then
    exit "$code"
elif ((restarts >= @max_requeues@)); then
    echo "the time limit came before the last step, and the job has been queued again $restarts times" >&2
    exit "$code"
fi
@stop_ray@
echo "the time limit comes before the last step: queueing the job again"
scontrol requeue "$SLURM_JOB_ID" || exit "$code"
