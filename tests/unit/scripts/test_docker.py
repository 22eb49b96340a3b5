"""docker/: the image's versions and files, and the commands of compose.yaml and kubernetes.yaml."""

import re
import shlex
import tomllib
from pathlib import PurePosixPath

import pytest
import yaml
from packaging.requirements import Requirement

from tests.helpers import ROOT, TINY_QWEN3
from torchtitan.config import JobConfig
from torchtitan.grpo.config.load import load_config
from torchtitan.grpo.servers.__main__ import parse_arguments
from torchtitan.grpo.servers.__main__ import planned as planned_servers

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COPIED = {source for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for source in line.split()}
SERVICES = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
CLAIM, JOB = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def words(command: str | list[str]) -> list[str]:
    """After the program and its script, which is in the image."""
    _, script, *rest = shlex.split(command) if isinstance(command, str) else command
    assert (ROOT / script).is_file() and PurePosixPath(script).parts[0] in COPIED
    return rest


def trained(command: str | list[str]) -> JobConfig:
    """The checked configuration of a trainer's command, whose recipe is in the image."""
    given = words(command)
    recipe = given[given.index("--job.config_file") + 1]
    assert PurePosixPath(recipe).parts[0] in COPIED
    return load_config(given)


def test_versions_are_those_of_pyproject():
    args = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    extras = PROJECT["project"]["optional-dependencies"]
    (vllm,) = extras["vllm"]
    assert args["VLLM_VERSION"] in Requirement(vllm).specifier
    assert args["EXTRAS"] in extras
    image = f"{PROJECT['project']['name']}:{PROJECT['project']['version']}"
    assert {image} == {CONTAINER["image"], *(service["image"] for service in SERVICES.values())}
    assert f"-t {image} ." in DOCKERFILE


def test_the_image_has_what_an_installation_reads():
    assert all((ROOT / source).exists() for source in COPIED)
    modules = {f"{name}.py" for name in PROJECT["tool"]["setuptools"]["py-modules"]}
    files = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml", "torchtitan"}
    assert modules | files | {"scripts", "train_configs"} <= COPIED


def test_trainer_and_server_of_compose_fit_each_other(tmp_path):
    server, trainer = SERVICES["server"], SERVICES["trainer"]
    _, _, module, model, *flags = shlex.split(server["command"])
    assert module == "torchtitan.grpo.servers"
    arguments = parse_arguments([str(TINY_QWEN3), *flags])
    (planned,) = planned_servers(arguments)
    (addresses := tmp_path / "servers.txt").write_text("http://127.0.0.1:20000")  # as the server writes it
    config = trained(trainer["command"].replace(str(arguments.urls_file), str(addresses)))
    assert config.rollout.engine == planned.engine and config.rollout.urls_file == str(addresses)
    assert str(arguments.urls_file) in server["healthcheck"]["test"]
    assert planned.host == "127.0.0.1" and trainer["network_mode"] == trainer["ipc"] == "service:server"
    assert server["ipc"] == "shareable", "the file of addresses and NCCL are in its /dev/shm"
    assert model == config.model.hf_assets_path
    assert planned.flags == ("--max-model-len", str(config.training.seq_len))
    (devices,) = trainer["deploy"]["resources"]["reservations"]["devices"]
    gpus = [trainer["environment"]["CUDA_VISIBLE_DEVICES"], *map(str, planned.gpus)]
    assert gpus == devices["device_ids"] and len({*gpus}) == 2
    paths = config.model.hf_assets_path, config.data.path, config.job.dump_folder
    folders = [path.split("/")[0] for path in paths]
    mounted = [volume.split(":")[:2] for volume in trainer["volumes"]]
    assert mounted == [[f"../{folder}", f"/opt/torchtitan-grpo/{folder}"] for folder in folders]


def test_the_job_of_kubernetes_has_the_gpus_and_the_volume_that_it_needs():
    config = trained(CONTAINER["args"])
    rollout = config.rollout
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == str(1 + rollout.replicas * rollout.gpus_per_server)
    (runs,) = [mount["mountPath"] for mount in CONTAINER["volumeMounts"] if mount["name"] == "runs"]
    (home,) = [variable["value"] for variable in CONTAINER["env"] if variable["name"] == "HF_HOME"]
    assert all(path.startswith(f"{runs}/") for path in (config.job.dump_folder, home))
    (volume,) = [volume for volume in POD["volumes"] if volume["name"] == "runs"]
    assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert POD["restartPolicy"] == "Never", "podFailurePolicy needs it"


@pytest.mark.parametrize("user", [r"--uid (\d+)", r"^USER (\d+)$"])
def test_the_user_is_the_one_that_owns_the_volume(user):
    (uid,) = re.findall(user, DOCKERFILE, re.MULTILINE)
    assert int(uid) == POD["securityContext"]["runAsUser"] == POD["securityContext"]["fsGroup"]
