set -e
RUNNER="python -u my_runner.py"
$RUNNER --plan plans/long.yaml --resume 2>&1 | tee run.log
