#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The chart's objects are as rules.py says, for several values, and a fault that is planted is found; so are those of an
engine's pod and of the compose file.

    chart.py ROOT FOLDER VERSION    FOLDER: tools/container; VERSION: the project's

It also compares with Helm and with Kubernetes' schemas, where there is a helm or Python's kubernetes_validate.
"""
from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

try:
    import jsonschema
    import yaml
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
sys.dont_write_bytecode = True
import render   # noqa: E402
import rules    # noqa: E402

FOLDER, VERSION = Path(sys.argv[2]), sys.argv[3]
CHART = FOLDER / "chart"
GPU = {"gpu": {"enabled": True}, "hugepages": {"enabled": True}, "file": {"enabled": True},
       "instances": [{"number": 0, "metricsPort": 9464}, {"number": 1, "metricsPort": 9465}]}
VALUES: dict[str, dict] = {
    "defaults": {},
    "all": {**GPU, "priority": {"create": True}, "domains": "[domain a]\nusers = 7", "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"a": "b"}, "podAnnotations": {"a": "b"}, "imagePullSecrets": [{"name": "s"}],
            "metrics": {"podMonitor": {"enabled": True, "labels": {"a": "b"}}}, "config": {"max_clients": "99"}},
    "little": {"prepareFolders": False, "metrics": {"enabled": False, "podMonitor": {"enabled": True}},
               "priority": {"className": "mine"}, "image": {"tag": "7"}},
}
REFUSED: list[dict] = [
    {"config": {"socket": "/tmp/kvd.sock"}}, {"config": {"pool": 4}}, {"config": {"pool": "4G\n[domain a]"}}, {"privileged": True},
    {"user": 0}, {"user": "root"}, {"instances": []}, {"instances": [{"number": 0}]}, {"hugepages": {"size": "4G"}},
    {"resources": {"limits": {"memory": None}}}, {"socketPath": "run/kvd"}, {"gpu": {"enable": True}},
]
wrong: list[str] = []


def expect(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        wrong.append(f"{what}: {found!r}, not {wanted!r}")


def values_of(others: dict) -> dict:
    return render.merged(yaml.safe_load((CHART / "values.yaml").read_text()), others)


def check_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    judge = jsonschema.Draft7Validator(schema)
    judge.check_schema(schema)
    for name, others in VALUES.items():
        expect(f"the schema on {name}", [error.message for error in judge.iter_errors(values_of(others))], [])
    for others in REFUSED:
        expect(f"the schema refuses {others}", judge.is_valid(values_of(others)), False)


# ---- the chart -----------------------------------------------------------------------------------

def pod(objects: list[dict]) -> dict:
    return next(it for it in objects if it["kind"] == "DaemonSet")["spec"]["template"]["spec"]


def of_kind(objects: list[dict], kind: str) -> dict:
    return next(it for it in objects if it["kind"] == kind)


def first(objects: list[dict]) -> dict:
    return pod(objects)["containers"][0]


def exporter(objects: list[dict]) -> dict:
    return pod(objects)["containers"][1]


# Each breaks the objects of "all" in one way, and must be noticed.
PLANTED: dict[str, Callable[[list[dict]], Any]] = {
    "privileged": lambda it: first(it)["securityContext"].update(privileged=True),
    "a capability": lambda it: first(it)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
    "no context": lambda it: exporter(it).pop("securityContext"),
    "a file system to write": lambda it: first(it)["securityContext"].update(readOnlyRootFilesystem=False),
    "root": lambda it: first(it)["securityContext"].update(runAsUser=0),
    "root, by the pod": lambda it: pod(it)["securityContext"].pop("runAsNonRoot"),
    "no seccomp": lambda it: pod(it)["securityContext"].pop("seccompProfile"),
    "hostIPC": lambda it: pod(it).update(hostIPC=True),
    "hostPID": lambda it: pod(it).update(hostPID=True),
    "hostNetwork": lambda it: pod(it).update(hostNetwork=True),
    "folders with more rights": lambda it: pod(it)["initContainers"][0]["securityContext"]["capabilities"]["add"].append("FOWNER"),
    "folders runs a shell": lambda it: pod(it)["initContainers"][0].update(command=["sh", "-c", "true"]),
    "no startup probe": lambda it: first(it).pop("startupProbe"),
    "no readiness probe": lambda it: first(it).pop("readinessProbe"),
    "no liveness probe": lambda it: first(it).pop("livenessProbe"),
    "a liveness that is readiness": lambda it: first(it)["livenessProbe"]["exec"].update(command=rules.READY),
    "a hasty probe": lambda it: first(it)["readinessProbe"].pop("timeoutSeconds"),
    "an exporter's probe elsewhere": lambda it: exporter(it)["livenessProbe"]["tcpSocket"].update(port="http"),
    "a mount without a volume": lambda it: pod(it)["volumes"].pop(),
    "a volume without a mount": lambda it: pod(it)["volumes"].append({"name": "more", "emptyDir": {}}),
    "no place for the keeper's socket": lambda it: first(it)["volumeMounts"].remove({"name": "tmp", "mountPath": "/tmp"}),
    "sockets in the pod alone": lambda it: exporter(it).update(volumeMounts=[]),
    "a hostPath of any type": lambda it: next(v for v in pod(it)["volumes"] if "hostPath" in v)["hostPath"].pop("type"),
    "another socket": lambda it: first(it)["env"][0].update(value="/run/kvd/kvd.sock"),
    "no memory limit": lambda it: first(it)["resources"]["limits"].pop("memory"),
    "fewer huge pages than asked for": lambda it: first(it)["resources"]["limits"].pop("hugepages-2Mi"),
    "a GPU taken from engines": lambda it: first(it)["resources"]["limits"].update({"nvidia.com/gpu": 1}),
    "all GPUs": lambda it: first(it)["env"][1].update(value="all"),
    "no runtime class": lambda it: pod(it).pop("runtimeClassName"),
    "one port twice": lambda it: exporter(it)["ports"][0].update(containerPort=9465),
    "a monitor of nothing": lambda it: of_kind(it, "PodMonitor")["spec"]["podMetricsEndpoints"][0].update(port="http"),
    "a selector of others": lambda it: of_kind(it, "DaemonSet")["spec"]["selector"]["matchLabels"].update(more="x"),
    "an account's token": lambda it: of_kind(it, "ServiceAccount").pop("automountServiceAccountToken"),
    "an old API": lambda it: of_kind(it, "DaemonSet").update(apiVersion="extensions/v1beta1"),
}


def check_planted() -> None:
    good = render.objects(CHART, VALUES["all"])
    for name, plant in PLANTED.items():
        bad = copy.deepcopy(good)
        plant(bad)
        if not rules.faults(bad):
            wrong.append(f"planted and not found: {name}")


def check_helm(name: str, others: dict, objects: list[dict]) -> None:
    """Helm makes the same objects. --strict would also want an icon."""
    if not shutil.which("helm"):
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(others, file)
        file.flush()
        for arguments in (["lint", str(CHART)], ["template", "kvd", str(CHART), "--namespace", "default"]):
            done = subprocess.run(["helm", *arguments, "--values", file.name], capture_output=True, text=True, check=False)
            expect(f"helm {arguments[0]}: {done.stdout[-500:] if done.returncode else ''}{done.stderr[-500:]}", done.returncode, 0)
    key = lambda it: it["kind"]     # noqa: E731
    theirs = [it for it in yaml.safe_load_all(done.stdout) if it]
    expect(f"Helm's objects of {name}", sorted(theirs, key=key), sorted(objects, key=key))


def check_kubernetes(name: str, objects: list[dict]) -> None:
    try:
        import kubernetes_validate  # noqa: PLC0415
    except ImportError:
        return
    for it in objects:
        if it["kind"] != "PodMonitor":      # not Kubernetes' own
            try:
                kubernetes_validate.validate(it, kubernetes_validate.latest_version(), strict=True)
            except kubernetes_validate.ValidationError as error:
                wrong.append(f"Kubernetes' schema on {it['kind']} of {name}: {error}")


def check_chart() -> None:
    for name, others in VALUES.items():
        objects = render.objects(CHART, others)
        expect(f"faults with {name}", rules.faults(objects), [])
        check_helm(name, others, objects)
        check_kubernetes(name, objects)
    kinds = {name: {it["kind"] for it in render.objects(CHART, others)} for name, others in VALUES.items()}
    expect("kinds with defaults", kinds["defaults"], {"DaemonSet", "ConfigMap", "ServiceAccount"})
    expect("kinds with all", kinds["all"] - kinds["defaults"], {"PodMonitor", "PriorityClass"})
    expect("kinds with little", kinds["little"], kinds["defaults"])
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    expect("the chart's versions", (about["version"], about["appVersion"]), (VERSION, VERSION))


# ---- the other files -----------------------------------------------------------------------------

def image_user() -> str:
    return re.findall(r"^USER (\S+)$", (FOLDER / "Containerfile").read_text(), re.M)[-1]


def check_engine() -> None:
    it = yaml.safe_load((FOLDER / "engine.yaml").read_text())
    values, engine = values_of({}), it["spec"]["containers"][0]
    expect("faults of the engine's pod", [*rules.host(it["spec"]), *rules.mounts(it["spec"])], [])
    expect("its groups", it["spec"]["securityContext"], {"supplementalGroups": [values["group"]]})
    expect("its socket is a daemon's", rules.socket_of(engine), rules.socket_of(first(render.objects(CHART, {}))))
    expect("its socket is in the volume", rules.lies_in_mount(engine, rules.socket_of(engine)), True)
    expect("its folder", it["spec"]["volumes"][0]["hostPath"]["path"], values["socketPath"])
    expect("it is not privileged", engine.get("securityContext", {}), {})
    check_kubernetes("the engine's pod", [it])


def check_compose() -> None:
    it = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    services = it["services"]
    expect("services", sorted(services), ["engine-1", "engine-2", "kvd", "metrics"])
    for name, service in services.items():
        expect(f"{name} mounts the sockets", service["volumes"], ["kvd:/run/kvd"])
        expect(f"{name} is apart", {"privileged", "ipc", "pid", "network_mode", "cap_add"} & service.keys(), set())
        if not name.startswith("engine"):
            expect(f"{name}'s rights", (service["user"], service["read_only"], service["cap_drop"], service["security_opt"]),
                   (image_user(), True, ["ALL"], ["no-new-privileges:true"]))
    expect("volumes", it["volumes"], {"kvd": None})
    expect("the probe", services["kvd"]["healthcheck"]["test"], ["CMD", *rules.READY])
    expect("the keeper's socket", services["kvd"]["tmpfs"], ["/tmp"])
    for name in ("engine-1", "engine-2"):
        expect(f"{name} waits", services[name]["depends_on"], {"kvd": {"condition": "service_healthy"}})
        expect(f"{name}'s group", services[name]["group_add"], [image_user().split(":")[1]])
        expect(f"{name}'s socket", services[name]["environment"], {"KVD_SOCKET": "/run/kvd/kvd.sock"})
    ports = [port for service in services.values() for port in service.get("ports", [])]
    expect("ports", len({port.rpartition(":")[0] for port in ports}), 3)
    expect("ports of this machine alone", [port for port in ports if not port.startswith("127.0.0.1:")], [])


def main() -> None:
    check_schema()
    check_chart()
    check_planted()
    check_engine()
    check_compose()
    expect("the image's user", image_user(), "{user}:{group}".format(**values_of({})))
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


main()
