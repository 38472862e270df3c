# SPDX-License-Identifier: Apache-2.0
"""What must be so in the chart's objects, whatever the values are. Each function yields its faults, in words."""
from __future__ import annotations

import configparser
from typing import Iterator

READY, ALIVE = ["kvctl", "health"], ["kvctl", "health", "--alive"]
GROUPS = {"DaemonSet": "apps/v1", "ConfigMap": "v1", "ServiceAccount": "v1", "PriorityClass": "scheduling.k8s.io/v1",
          "PodMonitor": "monitoring.coreos.com/v1"}


def faults(objects: list[dict]) -> list[str]:
    by_kind = {it["kind"]: it for it in objects}
    if len(by_kind) != len(objects) or not {"DaemonSet", "ConfigMap", "ServiceAccount"} <= by_kind.keys():
        return ["not one object of each kind"]
    daemons = by_kind["DaemonSet"]["spec"]
    pod = daemons["template"]["spec"]
    found = [*names(objects), *selected(daemons, by_kind), *host(pod), *users(pod), *mounts(pod), *configured(pod, by_kind),
             *monitored(pod, by_kind)]
    for container in pod["containers"]:
        found += [f"{container['name']}: {fault}" for fault in (*secure(container), *amounts(container), *probes(container))]
    return found + [f"folders: {fault}" for container in pod.get("initContainers", []) for fault in prepares(container)]


def names(objects: list[dict]) -> Iterator[str]:
    for it in objects:
        if GROUPS.get(it["kind"]) != it["apiVersion"]:
            yield f"{it['kind']} is not of {it['apiVersion']}"
        if not it["metadata"].get("name"):
            yield f"{it['kind']} has no name"


def selected(daemons: dict, by_kind: dict) -> Iterator[str]:
    labels = daemons["template"]["metadata"]["labels"]
    for kind, wanted in (("DaemonSet", daemons["selector"]), ("PodMonitor", by_kind.get("PodMonitor", {}).get("spec", {}).get("selector"))):
        if wanted and not (wanted["matchLabels"] and wanted["matchLabels"].items() <= labels.items()):
            yield f"{kind} does not select the pods"
    if daemons["template"]["spec"].get("serviceAccountName") != by_kind["ServiceAccount"]["metadata"]["name"]:
        yield "the pods have another account"
    if by_kind["ServiceAccount"].get("automountServiceAccountToken") is not False:
        yield "the account's token is in the pods"


def host(pod: dict) -> Iterator[str]:
    for what in ("hostIPC", "hostPID", "hostNetwork", "shareProcessNamespace"):
        if pod.get(what):
            yield f"{what} is set"


def users(pod: dict) -> Iterator[str]:
    context = pod.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser") or not context.get("runAsGroup"):
        yield "the pods may run as root"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "there is no seccomp profile"


def secure(container: dict) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context != {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}:
        yield f"its security context is {context}"


def prepares(container: dict) -> Iterator[str]:
    """The one container that is root: it may change owners of two folders, and nothing else."""
    wanted = {"runAsNonRoot": False, "runAsUser": 0, "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
              "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}}
    if container.get("securityContext") != wanted:
        yield f"its security context is {container.get('securityContext')}"
    if container["command"][0] != "chown" or set(container["command"][2:]) != {it["mountPath"] for it in container["volumeMounts"]}:
        yield f"it runs {container['command']}"


def amounts(container: dict) -> Iterator[str]:
    limits, requests = (container.get("resources", {}).get(kind, {}) for kind in ("limits", "requests"))
    if "memory" not in limits:
        yield "its memory has no limit"
    for kind in {*limits, *requests}:
        if kind.startswith("hugepages-") and limits.get(kind) != requests.get(kind):
            yield "huge pages that are requested and allowed differ"
        if kind not in ("cpu", "memory", "ephemeral-storage") and not kind.startswith("hugepages-"):
            yield f"it takes {kind} from engines"


def probes(container: dict) -> Iterator[str]:
    if container["command"][0] == "kvd":
        wanted = {"startupProbe": READY, "readinessProbe": READY, "livenessProbe": ALIVE}
        for probe, command in wanted.items():
            if container.get(probe, {}).get("exec", {}).get("command") != command:
                yield f"{probe} is not {command}"
            elif container[probe].get("timeoutSeconds", 1) <= 5:
                yield f"{probe} gives up before kvctl health"
    else:
        ports = {it["name"] for it in container.get("ports", [])}
        for probe, kind in (("readinessProbe", "httpGet"), ("livenessProbe", "tcpSocket")):
            if container.get(probe, {}).get(kind, {}).get("port") not in ports:
                yield f"there is no {probe} at a port that it has"
        if container.get("readinessProbe", {}).get("httpGet", {}).get("path") != "/healthz":
            yield "readinessProbe does not ask for /healthz"


def mounts(pod: dict) -> Iterator[str]:
    volumes = {it["name"]: it for it in pod.get("volumes", [])}
    used = {mount["name"] for it in containers(pod) for mount in it.get("volumeMounts", [])}
    yield from (f"there is no volume {name}" for name in used - volumes.keys())
    yield from (f"nothing mounts {name}" for name in volumes.keys() - used)
    if len({it["name"] for it in containers(pod)}) != len(containers(pod)):
        yield "two containers have one name"
    for name, volume in volumes.items():
        if "hostPath" in volume and volume["hostPath"].get("type") not in ("DirectoryOrCreate", "Directory"):
            yield f"{name} may be anything on the node"


def containers(pod: dict) -> list[dict]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def lies_in_mount(container: dict, path: str) -> bool:
    return any(path.startswith(mount["mountPath"].rstrip("/") + "/") for mount in container.get("volumeMounts", []))


def socket_of(container: dict) -> str:
    return next((it["value"] for it in container.get("env", []) if it["name"] == "KVD_SOCKET"), "")


def configured(pod: dict, by_kind: dict) -> Iterator[str]:
    """Every daemon listens where its container's kvctl and its exporter ask, in a folder of the node."""
    text = by_kind["ConfigMap"]["data"]["kvd.conf"]
    config = configparser.ConfigParser(interpolation=None)
    config.read_string(text)
    listens = set()
    for container in pod["containers"]:
        if container["command"][0] == "kvd":
            number = container["command"][container["command"].index("--instance") + 1]
            listens.add(config["daemon"]["socket"].replace("%i", number))
            if socket_of(container) not in listens:
                yield f"{container['name']} does not listen at {socket_of(container)}"
            named = [word for word in container["command"] if word.startswith("/")] + \
                [word.partition("=")[2] for word in container["command"] if word.startswith("daemon.file=")]
            yield from (f"{path} is not in a volume" for path in [*named, "/tmp/x"] if not lies_in_mount(container, path))
    for container in pod["containers"]:
        if socket_of(container) not in listens or not lies_in_mount(container, socket_of(container)):
            yield f"{container['name']} asks at {socket_of(container)}"
    if config["daemon"].get("backend") == "cuda":
        yield from sees_gpu(pod)


def sees_gpu(pod: dict) -> Iterator[str]:
    if not pod.get("runtimeClassName"):
        yield "no runtime class shows kvd its GPU"
    for container in pod["containers"]:
        visible = [it["value"] for it in container.get("env", []) if it["name"] == "NVIDIA_VISIBLE_DEVICES"]
        if (container["command"][0] == "kvd") != (len(visible) == 1 and visible[0].isdigit()):
            yield f"{container['name']} sees the GPUs {visible}"


def monitored(pod: dict, by_kind: dict) -> Iterator[str]:
    ports = [port for it in pod["containers"] for port in it.get("ports", [])]
    if len({it["containerPort"] for it in ports}) != len(ports):
        yield "two exporters have one port"
    for container in pod["containers"]:
        for port in container.get("ports", []):
            if not any(word.endswith(f":{port['containerPort']}") for word in container["command"]):
                yield f"{container['name']} does not listen at its port"
    for end in by_kind.get("PodMonitor", {}).get("spec", {}).get("podMetricsEndpoints", []):
        if end["port"] not in {it["name"] for it in ports} or end["path"] != "/metrics":
            yield f"nothing is at {end['port']}"
