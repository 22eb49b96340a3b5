# Functions that the scripts here share. Source this file. A function that sets variables says so.

# The repository's root folder.
repo_root() { cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd; }

# Print a Python of 3.11 to 3.14: $PYTHON if set, else the first that runs. A name on PATH may be a shim that fails.
find_python() {
    local name
    for name in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: no Python 3.11 to 3.14 found; set PYTHON to one" >&2
    return 1
}

# vLLM's and SGLang's environments for tests and CPU servers, outside the checkout so that clones share them.
vllm_cpu_venv() { echo "${TORCHTITAN_GRPO_VLLM_VENV:-$HOME/.cache/torchtitan-grpo/vllm-cpu}"; }
sglang_cpu_venv() { echo "${TORCHTITAN_GRPO_SGLANG_VENV:-$HOME/.cache/torchtitan-grpo/sglang-cpu}"; }

# lock_venv FOLDER: make the folder and keep other installers out until this script ends. Refuse a folder with other
# content. Sets `venv`, its absolute path.
lock_venv() {
    venv=$1
    if [ -d "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        echo "error: $venv is a folder with other things in it; name an empty or a new one" >&2
        exit 1
    fi
    mkdir -p "$venv"
    venv=$(cd "$venv" && pwd)
    exec 9> "$venv.lock" # two checkouts may share the environment
    flock -w 3600 9 || { echo "error: another install held $venv.lock for an hour" >&2; exit 1; }
}

# Make `venv` a virtual environment unless it is a working one. Sets `python`, its Python, and `work`, a temporary folder
# that is deleted when the script ends.
begin_install() {
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$(find_python)" -m venv --clear "$venv"
    python=$venv/bin/python
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
}

# install_torch PYTHON CONSTRAINT_FILE [cpu | torch==VERSION]: install torch unless it is there. Then pin it in the file,
# so that later installs keep it. Without a GPU, or with `cpu`, it is 2.13.0. pip prefers the CPU build if it can find one
# (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL); otherwise it installs the CUDA build, which is large.
install_torch() {
    local python=$1 constraints=$2 wanted="torch==2.13.0"
    if ! "$python" -c 'import torch' 2>/dev/null; then
        case ${3:-} in
            torch==*) wanted=$3 ;;
            cpu) ;;
            *) if nvidia-smi -L >/dev/null 2>&1; then wanted="torch>=2.11,<2.16"; fi ;;
        esac
        "$python" -m pip install --quiet "$wanted" || return
    fi
    "$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > "$constraints"
}

# Choose the virtual environment of this checkout: the active one, or .venv, which is made if it is missing. Call it from
# the repository's root. Sets `python`.
use_venv() {
    python=$(find_python)
    if ! "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
        [ -x .venv/bin/python ] || "$python" -m venv .venv
        # shellcheck disable=SC1091
        source .venv/bin/activate
        python=$(command -v python)
    fi
}

# Whether `python` has this checkout and torch, installed since pyproject.toml last changed.
is_installed() {
    "$python" -P - <<'PY' # -P: an egg-info that the installation has left in the checkout is not what is installed
import importlib.util
import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

try:
    installed = distribution("torchtitan-grpo")
except PackageNotFoundError:
    sys.exit(1)
url = json.loads(installed.read_text("direct_url.json") or "{}").get("url")
records = [Path(str(installed.locate_file(file))) for file in installed.files or [] if file.name == "RECORD"]
since = max((record.stat().st_mtime for record in records), default=0)
current = url == Path.cwd().as_uri() and since > Path("pyproject.toml").stat().st_mtime
sys.exit(not (current and importlib.util.find_spec("torch")))
PY
}

# install_project WHAT: install torch and this checkout, `.` or with extras, for `python`.
install_project() {
    local constraints
    echo "== install into $("$python" -c 'import sys; print(sys.prefix)')"
    constraints=$(mktemp)
    install_torch "$python" "$constraints"
    "$python" -m pip install --quiet -c "$constraints" -e "$1"
    rm -f "$constraints"
}
