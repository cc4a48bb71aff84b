export BASE=small-base
export RUN=first
bash ./recipes/verl/run_small.sh
