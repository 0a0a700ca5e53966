# Sourced at the top of the checkout: the releases of SGLang that the package is tested with, and the environment of each.
unset PYTHONDONTWRITEBYTECODE  # where it is set, as in many images, each process would compile thousands of modules again
tested=($(sed -n 's/^TESTED = (\(.*\)).*/\1/p' sglang_freekv/releases.py | tr -d '",'))
newest=${tested[-1]}

# Prints the name of a release's environment.
environment_of() {
  if [ "$1" = "$newest" ]; then echo .venv; else echo ".venv-$1"; fi
}

# Whether the package is tested with a release.
is_tested() {
  [[ " ${tested[*]} " == *" $1 "* ]]
}
