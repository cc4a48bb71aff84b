phase() {
  shift
  if "$@"; then echo done; fi
}
phase first python -m own_package.cli --plan "$1"
