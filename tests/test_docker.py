"""The image's recipe and the manifests hold what the documentation claims of them."""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rocm_dp.cli import _parser
from rocm_dp.doctor.diagnosis import names

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
HELD: dict[str, Any] = runpy.run_path(str(DOCKER / "held.py"))
K8S = sorted((DOCKER / "k8s").glob("*.yaml"))
KUBERNETES = ("1.29", "1.31", "1.33")


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


DOCKERFILE = instructions((DOCKER / "Dockerfile").read_text())


def said(word: str) -> list[str]:
    return [rest for instruction, rest in DOCKERFILE if instruction == word]


def test_there_are_two_stages_on_one_base_that_is_pinned_and_can_be_replaced() -> None:
    assert said("FROM") == ["${BASE_IMAGE} AS wheel", "${BASE_IMAGE}"]
    base = said("ARG")[0].removeprefix("BASE_IMAGE=")
    assert re.fullmatch(r"rocm/pytorch:rocm7\.2\.\d+_ubuntu24\.04_py3\.12_pytorch_release_2\.(9|1\d)\.\d+", base)
    assert re.search(r"^# sha256:[0-9a-f]{64}$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)


def test_no_file_of_the_image_names_a_registry_or_an_index() -> None:
    for path in (path for path in DOCKER.rglob("*") if path.is_file()):
        text = path.read_text()
        assert not re.search(r"https?://|--(extra-)?index-url|docker\.io|ghcr\.io|quay\.io|localhost:\d", text), (
            path
        )


def test_the_base_decides_the_versions_and_the_build_ends_when_one_changed() -> None:
    [install] = [run for run in said("RUN") if "pip install" in run]
    steps = [step.strip() for step in install.split("&&")]
    assert "held.py before" in steps[0]
    assert "--constraint /opt/rocm_dp/constraints.txt" in steps[1]
    assert "held.py after" in steps[2]
    assert not any("--no-deps" in step or "--upgrade" in step or "|| true" in step for step in steps)


def test_everything_that_is_copied_is_there_and_let_in() -> None:
    let_in = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = [shlex.split(rest)[:-1] for rest in said("COPY") if not rest.startswith("--from")]
    for name in (name for names_ in copied for name in names_):
        assert (ROOT / name).exists()
        assert name in let_in


def test_the_last_user_is_a_number_that_is_not_roots_in_both_groups() -> None:
    words = [(word, rest) for word, rest in DOCKERFILE if word in {"USER", "ENTRYPOINT"}]
    assert words[-2:] == [("USER", "10001"), ("ENTRYPOINT", '["tini", "-s", "-g", "--", "rocm-dp"]')]
    [user] = [run for run in said("RUN") if "useradd" in run]
    assert "--uid 10001" in user
    assert "--groups video,render" in user


def test_kernels_are_compiled_for_both_gpus_where_triton_looks_as_the_user_who_runs() -> None:
    order = [f"{word} {rest}" for word, rest in DOCKERFILE]
    warm = order.index('RUN rocm-dp kernels --arch gfx942,gfx950 --save "$TRITON_CACHE_DIR"')
    assert order.index("USER 10001") < warm
    [cache] = [index for index, line in enumerate(order) if line.startswith("ENV TRITON_CACHE_DIR=/home/rocm_dp/")]
    assert cache < warm


def test_every_preset_has_its_reason_on_the_line_above() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    presets = {}
    for before, line in itertools.pairwise(lines):
        if line.startswith("ENV "):
            name, _, value = line.removeprefix("ENV ").partition("=")
            assert before.startswith("# "), f"{name} has no reason"
            presets[name] = value
    assert {
        "PYTHONSAFEPATH": "1",
        "GPU_MAX_HW_QUEUES": "8",
        "HSA_ENABLE_IPC_MODE_LEGACY": "1",
    }.items() <= presets.items()
    assert not {"NCCL_MIN_NCHANNELS", "HSA_NO_SCRATCH_RECLAIM"} & presets.keys()


def test_the_health_check_makes_checks_that_there_are_and_opens_no_gpu() -> None:
    [check] = said("HEALTHCHECK")
    command = json.loads(check[check.index("CMD ") + 4 :])
    assert command[:2] == ["rocm-dp", "doctor"]
    assert {command[at + 1] for at, word in enumerate(command) if word == "--only"} <= set(names())


def test_the_image_says_what_it_is() -> None:
    [labels] = said("LABEL")
    for name in ("title", "description", "licenses", "base.name"):
        assert f"org.opencontainers.image.{name}=" in labels


# What holds the base's packages


def held(*arguments: str, packages: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """held.py, where just these distributions are installed."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    for old in site.glob("*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    for name, version in packages.items():
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    code = (
        f"import sys, runpy; sys.path[:] = [{str(site)!r}, *(p for p in sys.path if 'site-packages' not in p)];"
        f"sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f)];"
        f"sys.argv = ['held.py', *{list(arguments)!r}];"
        f"runpy.run_path({str(DOCKER / 'held.py')!r}, run_name='__main__')"
    )
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


BASE = {"torch": "2.10.0+rocm7.2.4", "triton": "3.6.0+rocm7.2.4", "numpy": "2.2.6"}


def test_torch_and_triton_become_constraints_and_other_packages_do_not(tmp_path: Path) -> None:
    done = held("before", "held.json", "--constraints", "constraints.txt", packages=BASE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    constraints = (tmp_path / "constraints.txt").read_text().split()
    assert constraints == ["torch==2.10.0+rocm7.2.4", "triton==3.6.0+rocm7.2.4"]


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({**BASE, "torch": "2.10.0"}, "torch was 2.10.0+rocm7.2.4 in the base image, and is 2.10.0 now"),
        ({**BASE, "nvidia-nccl-cu12": "2.27.5"}, "nvidia-nccl-cu12 2.27.5 is a CUDA package"),
        ({**BASE, "triton": "3.7.1"}, "triton was 3.6.0+rocm7.2.4 in the base image, and is 3.7.1 now"),
        ({**BASE, "pytorch-triton-rocm": "3.5.0"}, "pytorch-triton-rocm was absent in the base image"),
        ({name: version for name, version in BASE.items() if name != "torch"}, "there is no torch"),
        (BASE, "rocm_dp.kernels can't be imported: ModuleNotFoundError"),
    ],
)
def test_the_build_ends_with_the_reason(packages: dict[str, str], reason: str, tmp_path: Path) -> None:
    assert held("before", "held.json", packages=BASE, folder=tmp_path).returncode == 0
    done = held("after", "held.json", packages=packages, folder=tmp_path)
    assert done.returncode == 1
    assert reason in done.stderr


def test_a_base_with_a_cuda_package_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    done = held("before", "held.json", packages={**BASE, "nvidia-cublas-cu12": "12.8"}, folder=tmp_path)
    assert done.returncode == 1
    assert "nvidia-cublas-cu12 12.8 is a CUDA package" in done.stderr


def test_the_image_and_a_checkout_hold_the_same_packages() -> None:
    assert HELD["HELD"].pattern == runpy.run_path(str(ROOT / ".ci/venv.py"))["HELD"].pattern


def test_nothing_is_wrong_with_an_image_that_kept_everything() -> None:
    assert HELD["faults"](HELD["held"](BASE), {**BASE, "rocm-dp": "0.1.0", "psutil": "7.0.0"}) == []
    assert HELD["import_fault"]() == []


# Manifests


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def jobs(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Every Job that a manifest makes, as a manifest of its own."""
    if found["kind"] == "Job":
        return [found]
    if found["kind"] == "CronJob":
        specs = [found["spec"]["jobTemplate"]["spec"]]
    else:
        specs = [each["template"]["spec"] for each in found["spec"]["replicatedJobs"]]
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec} for spec in specs]


JOBS = [pytest.param(job, id=f"{path.stem}") for path in K8S for found in documents(path) for job in jobs(found)]


def test_there_is_a_manifest_for_one_node_for_several_and_for_every_night() -> None:
    assert {found["kind"] for path in K8S for found in documents(path)} == {"Job", "JobSet", "CronJob"}


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_fit_the_schemas_of_kubernetes(version: str) -> None:
    for found in (found for path in K8S for found in documents(path)):
        for manifest in [*jobs(found), *([found] if found["apiVersion"] == "batch/v1" else [])]:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_does_not_fit() -> None:
    [found] = documents(DOCKER / "k8s/job.yaml")
    found["spec"]["template"]["spec"]["containers"][0]["recources"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found, KUBERNETES[0], strict=True)


@pytest.mark.parametrize("job", JOBS)
def test_pods_run_without_root_with_a_shared_memory_of_their_own(job: dict[str, Any]) -> None:
    pod = job["spec"]["template"]["spec"]
    security = pod["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 10001)
    assert security["supplementalGroups"]
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    [container] = pod["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["amd.com/gpu"] == 8
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["medium"] == "Memory"
    assert "/reports" in mounts
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["activeDeadlineSeconds"] > 0


def test_ranks_of_two_nodes_meet_at_the_first_pod_by_its_name() -> None:
    [found] = documents(DOCKER / "k8s/jobset.yaml")
    [workers] = found["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    host = f"{found['metadata']['name']}-{workers['name']}-0-0.{found['spec']['network']['subdomain']}"
    assert f"--master-addr={host}" in container["args"]
    assert f"--nnodes={spec['completions']}" in container["args"]
    assert f"--nproc-per-node={container['resources']['limits']['amd.com/gpu']}" in container["args"]
    assert spec["completionMode"] == "Indexed"
    assert found["spec"]["network"]["enableDNSHostnames"] is True
    assert {f"$({env['name']})" for env in container["env"]} == {"$(NODE_RANK)"}


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    return found


def test_compose_gives_each_service_the_devices_and_limits_that_the_doctor_looks_for() -> None:
    assert set(services()) == {"doctor", "validate", "soak"}
    for service in services().values():
        assert service["devices"] == ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]
        assert service["init"] is True
        assert service["ipc"] == "host"
        assert service["group_add"][0] == "video"
        assert "RENDER_GID" in service["group_add"][1]
        assert "seccomp=unconfined" in service["security_opt"]
        assert service["cap_drop"] == ["ALL"]
        assert service["ulimits"] == {"memlock": -1, "nofile": 1048576}
        assert not {"privileged", "network_mode", "pid", "user"} & service.keys()


# Commands in manifests, scripts and the documentation


def test_the_readme_leads_from_the_image_to_a_passed_soak_on_each_kind_of_cluster() -> None:
    section = (ROOT / "README.md").read_text().split("## On a cluster\n")[1].split("\n## ")[0]
    told = section + (ROOT / "docs/deploy.md").read_text()
    named = set(re.findall(r"docker/[\w/-]+\.(?:yaml|sbatch)", told))
    there = [*DOCKER.rglob("*.yaml"), *DOCKER.rglob("*.sbatch")]
    assert named == {str(path.relative_to(ROOT)) for path in there}
    rows = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in section.splitlines())}
    on_docker, on_kubernetes, on_slurm = rows["soak"]
    assert "docker/compose.yaml run --rm soak" in on_docker
    assert "docker/slurm/soak.sbatch" in on_slurm
    [nightly] = documents(DOCKER / "k8s/soak-cronjob.yaml")
    assert f"create job soak-now --from=cronjob/{nightly['metadata']['name']}" in on_kubernetes
    # Without it the soak ends before it starts.
    assert "pip install '.[soak]'" in rows["the image"][2]
    [(replaced, files)] = re.findall('sed -i "s#(.+?)#.+?#" (.+?)`', section)
    assert sorted(ROOT.glob(files)) == K8S
    assert all(path.read_text().count(f" {replaced}\n") == 1 for path in K8S)


def test_the_documentation_and_compose_give_the_same_flags() -> None:
    told = (ROOT / "docs/deploy.md").read_text().split("## What a container needs")[1].split("\n## ")[0]
    flags = re.findall(r"--(?:device|group-add|ipc|security-opt|ulimit)[= ]([^ `]+)", told)
    for service in services().values():
        devices = [device.split(":")[0] for device in service["devices"]]
        limits = [f"{name}={value}" for name, value in service["ulimits"].items()]
        given = [*devices, "video", "$RENDER_GID", service["ipc"], service["security_opt"][1], *limits]
        assert flags == given


def started() -> list[list[str]]:
    """Every rocm-dp command line of the image, the manifests and the scripts."""
    lines = [service["command"] for service in services().values()]
    for job in (job for path in K8S for found in documents(path) for job in jobs(found)):
        [container] = job["spec"]["template"]["spec"]["containers"]
        arguments = container["args"]
        lines.append(arguments[arguments.index("rocm-dp") + 1 :] if "rocm-dp" in arguments else arguments)
    for path in (DOCKER / "slurm").glob("*.sbatch"):
        text = re.sub(r"\\\n\s*", "", path.read_text())
        found = re.findall(r"^srun .*?rocm-dp (.*)$", text, re.MULTILINE)
        lines += [shlex.split(re.sub(r"\$\{\w+:-(\w+)\}", r"\1", line.replace("|| true", ""))) for line in found]
    lines.append(json.loads(said("CMD")[0]))
    return lines


def test_every_command_that_is_started_is_one_with_these_options() -> None:
    assert len(started()) >= 10
    assert {"doctor", "validate", "soak"} <= {line[0] for line in started()}
    for line in started():
        _parser().parse_args(line)


def test_an_option_that_there_is_not_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = [service["command"] for name, service in services().items() if name == "soak"]
    with pytest.raises(SystemExit):
        _parser().parse_args([*line, "--hours", "1"])
    assert "unrecognized arguments: --hours 1" in capsys.readouterr().err


def checked(tool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What a tool of the environment says."""
    command = [Path(sys.executable).parent / tool, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("path", sorted((DOCKER / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_scripts_are_sound(path: Path) -> None:
    done = checked("shellcheck", "--shell=bash", path)
    assert done.returncode == 0, done.stdout
    assert "set -euo pipefail" in path.read_text()


@pytest.mark.parametrize("path", sorted((DOCKER / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_scripts_run_with_as_many_files_as_the_host_allows(path: Path, tmp_path: Path) -> None:
    for tool, says in (("srun", 'echo "$(ulimit -n) $*"'), ("scontrol", "echo node7")):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / tool).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "11", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
    done = subprocess.run(
        ["bash", "-c", 'ulimit -Sn 1000 && ulimit -Hn 2000 && exec bash "$1"', "bash", path],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("2000 ") for line in done.stdout.splitlines())
    assert re.search(r"--rdzv-endpoint=node7:29500 .* validate|doctor --record machine-11\n.* soak", done.stdout)


def test_the_recipe_is_sound_and_what_is_not_kept_of_the_rules_has_its_reason(tmp_path: Path) -> None:
    text = (DOCKER / "Dockerfile").read_text()
    done = checked("hadolint", "--no-color", DOCKER / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    assert all(re.search(r"DL\d+  # \w", line) for line in text.splitlines() if "hadolint ignore" in line)
    (tmp_path / "Dockerfile").write_text(text.replace("USER 10001", "USER root"))
    assert "DL3002" in checked("hadolint", "--no-color", tmp_path / "Dockerfile").stdout


def test_the_makefile_builds_and_tries_this_image() -> None:
    done = subprocess.run(
        [
            "make",
            "--no-print-directory",
            "--dry-run",
            "image-try",
            "ENGINE=podman",
            "IMAGE=here/rocm-dp",
            "BASE_IMAGE=local/base",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    build, *runs = done.stdout.splitlines()
    assert build == ("podman build --file docker/Dockerfile --build-arg BASE_IMAGE=local/base --tag here/rocm-dp .")
    lines = [shlex.split(run) for run in runs]
    commands = [line[line.index("here/rocm-dp") + 1 :] for line in lines]
    assert [command[0] for command in commands] == ["info", "doctor", "demo", "validate", "soak"]
    for command in commands:
        args = _parser().parse_args(command)
        assert set(getattr(args, "only", [])) <= set(names())
