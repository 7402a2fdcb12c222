#!/usr/bin/env bash
# Run a training command until it is done. After a crash start it again with --resume auto:
#   bash scripts/supervise.sh python algos/grpo.py --run-dir runs/night --save-every 10
#   bash scripts/supervise.sh torchrun --nproc-per-node 8 algos/grpo.py --run-dir runs/night --save-every 10
# It stops when the command is done (exit code 0), when its input is wrong (2; torchrun makes 1 of every exit code, so
# that wrong input counts as a crash there: try --dry-run first), when it is asked to stop (Ctrl-C or SIGTERM: the step
# is ended and saved), and at a crash after RESTARTS restarts in a row (default 5). It waits DELAY seconds (10)
# before the first restart, and twice as long before each further one. A run of HOUR seconds (3600) resets the count.
# torchrun restarts crashed ranks by itself, and sooner: --max-restarts 5 --shutdown-timeout 600, and --resume auto.
set -uo pipefail
restarts=${RESTARTS:-5} delay=${DELAY:-10} hour=${HOUR:-3600}
folder= resumes= before=
for word in "$@"; do
  case $before in --run-dir | --run_dir) folder=$word ;; esac
  case $word in --run-dir=* | --run_dir=*) folder=${word#*=} ;; --resume | --resume=*) resumes=yes ;; esac
  before=$word
done
if [ -z "$folder" ]; then
  echo "error: supervise.sh: the command needs --run-dir, the run to go on with" >&2
  exit 2
fi
asked= child=
trap 'asked=yes; [ -z "$child" ] || kill -TERM "$child" 2> /dev/null' INT TERM
crashes=0
while :; do
  began=$SECONDS child=
  # A checkpoint that the command names is where the run begins. Once it has one of its own, it goes on from that.
  resume="--resume auto"
  [ -z "$resumes" ] || compgen -G "$folder/checkpoints/step_*/state.json" > /dev/null || resume=
  # shellcheck disable=SC2086
  "$@" $resume &
  child=$!
  [ -z "$asked" ] || kill -TERM "$child" 2> /dev/null # it was asked before the shell knew the child
  wait "$child"
  code=$?
  while kill -0 "$child" 2> /dev/null; do # a signal ended the wait, not the command
    wait "$child"
    code=$?
  done
  [ "$code" = 0 ] || [ "$code" = 2 ] || [ -n "$asked" ] && exit "$code"
  [ $((SECONDS - began)) -lt "$hour" ] || crashes=0
  crashes=$((crashes + 1))
  if [ "$crashes" -gt "$restarts" ]; then
    echo "supervise.sh: exit code $code, crash $crashes in a row: giving up" >&2
    exit "$code"
  fi
  pause=$((delay << (crashes - 1)))
  echo "supervise.sh: exit code $code; restart $crashes of $restarts in $pause s" >&2
  sleep "$pause" &
  child=$!
  wait "$child"
  [ -z "$asked" ] || exit "$code"
done
