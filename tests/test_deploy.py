"""The files of deploy/: what they run, and that their parts fit together. No cluster has tried them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from quire.cli.main import complete_parser

from service.config import Config
from service.config_sources import read_settings
from tests.gateway_process import ROOT
from tests.programs import output_of, run

DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
# The oldest that is maintained, and the newest that there is a schema of.
KUBERNETES = ("1.34", "1.37")
# Resources of operators, which these schemas do not have.
FOREIGN = {"ServiceMonitor"}
Object = dict[str, Any]


def read(*paths: Path) -> list[Object]:
    return [each for path in paths for each in yaml.safe_load_all(path.read_text()) if each]


def base() -> list[Object]:
    return read(
        *(BASE / name for name in yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"])
    )


def rendered(directory: Path) -> list[Object]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    return list(yaml.safe_load_all(output_of("kubectl", "kustomize", directory)))


@pytest.fixture(params=["as written", "base", "plaintext", "postgres", "postgres, plaintext", "example"])
def variant(request: pytest.FixtureRequest, tmp_path: Path) -> list[Object]:
    if request.param == "as written":
        return base()
    if request.param in ("base", "example"):
        return rendered(DEPLOY / "kubernetes" / request.param)
    found = Path(os.path.relpath(DEPLOY / "kubernetes", tmp_path.resolve()))
    components = ", ".join(f"{found}/{name}" for name in request.param.split(", "))
    text = f"resources: [{found}/base]\ncomponents: [{components}]\n"
    (tmp_path / "kustomization.yaml").write_text(text)
    return rendered(tmp_path)


def one(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def container(objects: list[Object], name: str) -> Object:
    kind = "StatefulSet" if name == "quire-gateway" else "Deployment"
    (found,) = one(objects, kind, name)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_each_variant_fits_the_schemas(variant: list[Object]) -> None:
    for each in variant:
        for version in KUBERNETES:
            if each["kind"] not in FOREIGN:
                kubernetes_validate.validate(each, version, strict=True)
    services = [each for each in variant if each["kind"] == "Service"]
    sets = [each for each in variant if each["kind"] in ("StatefulSet", "Deployment")]
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in sets]
    for each in variant:
        spec = each.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        wanted = selector and selector.get("matchLabels", selector)
        if wanted and each["kind"] not in FOREIGN:
            assert labels.count(wanted) == 1, f"{each['kind']} selects no pods"
    for each in sets:
        if each["kind"] == "StatefulSet":
            assert each["spec"]["serviceName"] in [service["metadata"]["name"] for service in services]
        pod = each["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        (only,) = pod["containers"]
        assert {mount["name"] for mount in only["volumeMounts"]} == volumes
        ports = {port["name"] for port in only.get("ports", ())}
        probed = {
            part["port"]
            for name in only
            if name.endswith("Probe")
            for part in only[name].values()
            if isinstance(part, dict)
        }
        assert {port for port in probed if isinstance(port, str)} <= ports


def files_of_pods(here: Path) -> dict[str, str]:
    """What volumes of the gateway contain, below `here`."""
    for name in ("pool", "tls", "config"):
        (here / name).mkdir()
    for file in ("pool/ca.pem", "pool/gateway.pem", "pool/gateway-key.pem", "tls/tls.crt", "tls/tls.key"):
        (here / file).touch()
    return {"/etc/quire": str(here)}


def settings_of(gateway: Object, here: Path) -> Config:
    """As the container's flags, environment and file give them."""
    places = files_of_pods(here)

    def placed(text: str) -> str:
        for place, ours in places.items():
            text = text.replace(place, ours)
        return text

    (here / "config" / "quire.toml").write_text(placed((BASE / "quire.toml").read_text()))
    environ: dict[str, str] = {}
    for each in gateway["env"]:
        value = re.sub(r"\$\((\w+)\)", lambda name: environ[name[1]], each.get("value", ""))
        # What the cluster fills in is an address here, as that of the pod is.
        environ[each["name"]] = placed(value) or "127.0.0.1"
    # A directory of the cluster, not of this machine.
    environ.pop("QUIRE_MODEL", None)
    parsed = complete_parser().parse_args([placed(argument) for argument in gateway["args"]])
    settings = read_settings(vars(parsed), environ)
    assert not settings.errors
    return settings.config


def test_each_variant_serves_with_its_settings(variant: list[Object], tmp_path: Path) -> None:
    gateway, worker = container(variant, "quire-gateway"), container(variant, "quire-worker")
    config = settings_of(gateway, tmp_path)
    listening = {
        config.listen: "grpc",
        config.values()["metrics_listen"]: "metrics",
        config.values()["peer_listen"]: "peers",
        config.pool_listen: "pool",
    }
    listening.pop("", None)
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    assert {name: int(address.rpartition(":")[2]) for address, name in listening.items()} == ports
    if config.has_other_hosts:
        # No hook is needed: also at SIGTERM the workers keep their KV, for the other gateways.
        assert config.journal.startswith("postgresql:") and "lifecycle" not in gateway
    grace_s = one(variant, "StatefulSet", "quire-gateway")["spec"]["template"]["spec"][
        "terminationGracePeriodSeconds"
    ]
    assert grace_s > config.lame_duck_s + config.drain_grace_s
    parsed = vars(complete_parser().parse_args(worker["args"]))
    assert config.workers == one(variant, "Deployment", "quire-worker")["spec"]["replicas"]
    service, _, port = parsed["gateway"].rpartition(":")
    (dialled,) = one(variant, "Service", service)["spec"]["ports"]
    assert (dialled["port"], ports[dialled["targetPort"]]) == (int(port), int(port))
    # It listens on nothing, and starts its process again by itself.
    assert not {name for name in worker if name.endswith("Probe")} and "ports" not in worker
    probe = gateway["readinessProbe"]
    if config.tls_cert:
        assert probe["httpGet"]["path"] == "/readyz" and config.insecure == "off"
    else:
        assert probe["grpc"]["port"] == ports["grpc"] and "httpGet" not in probe and config.insecure == "on"


def test_services_say_whether_there_is_tls(variant: list[Object]) -> None:
    """A proxy that is told h2c speaks HTTP/2 without TLS to the pods."""
    environ = {each["name"] for each in container(variant, "quire-gateway")["env"]}
    expected = "https" if "QUIRE_TLS_CERT" in environ else "kubernetes.io/h2c"
    services = [each["spec"] for each in variant if each["kind"] == "Service"]
    ports = [port for spec in services for port in spec["ports"] if port["targetPort"] == "grpc"]
    assert ports and {port["appProtocol"] for port in ports} == {expected}
    assert all("appProtocol" not in port for spec in services for port in spec["ports"] if port not in ports)


def test_secrets_have_what_either_side_reads() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    for name, kind, role in (
        ("quire-gateway", "StatefulSet", "gateway"),
        ("quire-worker", "Deployment", "worker"),
    ):
        pod = one(base(), kind, name)["spec"]["template"]["spec"]
        (secret,) = [each["secret"] for each in pod["volumes"] if each["name"] == "pool"]
        files = " ".join(f"--from-file=pool/{file}" for file in ("ca.pem", f"{role}.pem", f"{role}-key.pem"))
        assert f"secret generic {secret['secretName']} {files}" in page.replace("\\\n  ", "")


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").iterdir()), ids=lambda path: path.name)
def test_units(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    (started,) = re.findall(r"^ExecStart=(.*)$", text, flags=re.MULTILINE)
    arguments: list[str] = []
    for instance in (0, 1, 9, 10, 123):
        # The variable is in the file that the unit names.
        program, *arguments = shlex.split(started.replace("%i", str(instance)).replace("${GATEWAY}", "g:1"))
        assert program == "/opt/quire/bin/quire"
        parsed = vars(complete_parser().parse_args(arguments))
        if "worker" in arguments:
            assert (parsed["gateway"], parsed["device_index"]) == ("g:1", instance)
    (grace_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, flags=re.MULTILINE)
    if "serve" in arguments:
        assert int(grace_s) > Config().lame_duck_s + Config().drain_grace_s
    if shutil.which("systemd-analyze") is not None:
        (tmp_path / unit.name).write_text(text.replace("/opt/quire/bin/quire", shutil.which("true") or ""))
        done = run("systemd-analyze", "verify", tmp_path / unit.name)
        assert (done.returncode, done.stderr) == (0, "")
