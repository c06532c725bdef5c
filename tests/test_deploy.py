"""What `deploy/` promises: images whose commands exist, containers that can do no more than they must, files in place.

No container runs here: the commands are read by the programs' own parsers, and the device's are run as they stand.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from paths import ROOT

from ndp_device.__main__ import app as ndp_device
from vllm_ndp.config import NdpSettings
from vllm_ndp.layer.split import PAIR_KINDS, PROMPT_KINDS

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Of the Dockerfile: stage -> (instruction, rest), continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    found: dict[str, list[tuple[str, str]]] = {}
    stage: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            if word == "FROM":
                stage = found.setdefault(rest.split()[-1], [])
            stage.append((word, rest))
    return found


def one(stage: str, instruction: str) -> str:
    (rest,) = [rest for word, rest in stages()[stage] if word == instruction]
    return rest


def resolved(text: str) -> str:
    """Compose's ${NAME:-default}; a name without a default is the bundled model's."""
    return re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)?\}", lambda match: match[1] or "", text)


def test_what_is_copied_into_the_build_is_there_and_nothing_else_is_sent() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = {source for word, rest in stages()["build"] if word == "COPY" for source in rest.split()[:-1]}
    mounted = {
        name for stage in stages().values() for _, rest in stage for name in re.findall(r"bind,source=([^,]+)", rest)
    }
    assert copied | mounted == sent
    assert all((ROOT / name).exists() for name in sent)


def test_the_devices_image_starts_serving_and_answers_its_own_health_check(tmp_path: Path) -> None:
    """Entry point, command and check as they stand, with the paths of the container below a directory of this test."""

    def here(words: list[str]) -> list[str]:
        local = {
            "/models/model": ROOT / "models/tiny-mixtral",
            "/models/replicas": ROOT / "models/tiny-mixtral-replicas",
        }
        replaced = [str(local.get(word, word)).replace("/run/ndp", str(tmp_path)) for word in words]
        return [str(BIN / replaced[0]), *replaced[1:]]

    serve = json.loads(one("device", "ENTRYPOINT")) + json.loads(one("device", "CMD"))
    check = json.loads(one("device", "HEALTHCHECK").partition("CMD ")[2])
    assert subprocess.run(here(check), capture_output=True, timeout=60).returncode != 0
    with subprocess.Popen(here(serve), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as device:
        assert device.stdout is not None
        try:
            assert json.loads(device.stdout.readline())["ready"] is True
            well = subprocess.run(here(check), capture_output=True, text=True, timeout=60)
        finally:
            device.terminate()
    assert well.returncode == 0, well.stderr
    assert json.loads(well.stdout)["pong"] is True


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_can_do_no_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not {"privileged", "cap_add", "devices"} & set(service)
    made_here = "build" in service and service["image"].endswith(":local")
    assert made_here or re.fullmatch(r"[\w./-]+:v?\d[\w.]*", service["image"]), "an image has a version"
    assert "user" in service or "build" in service
    assert "healthcheck" in service or service["build"]["target"] in ("device", "server")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for volume in service["volumes"]:
        source, target, *mode = resolved(volume).split(":")
        if not re.fullmatch(r"\w+", source):  # what lies on the host is only read
            assert mode == ["ro"], volume
        if source.startswith("./"):
            assert (DEPLOY / source).is_dir(), volume
        assert target.startswith("/")


def test_the_server_may_open_the_devices_memory_and_nobody_reaches_the_device() -> None:
    assert SERVICES["server"]["pid"] == "service:device"
    assert SERVICES["device"]["network_mode"] == "none"
    shared = [{v for v in SERVICES[name]["volumes"] if v.startswith("socket:")} for name in ("device", "server")]
    assert shared[0] == shared[1] != set()


def test_each_program_that_listens_binds_the_one_address_of_its_container_by_its_name() -> None:
    """No wildcard, said or by default: vLLM, Prometheus and Grafana take every address unless they are told. Health
    checks, and Prometheus for its targets, ask where the program listens."""
    server, prometheus, grafana = (SERVICES[name] for name in ("server", "prometheus", "grafana"))
    assert (server["hostname"], grafana["hostname"]) == ("server", "grafana")
    assert "--host=server" in server["command"]
    alone = json.loads(one("server", "CMD"))
    assert alone[alone.index("--host") + 1] == "server"
    assert "http://server:8000/health" in one("server", "HEALTHCHECK")
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"] == [{"targets": ["server:8000"]}]
    assert "--web.listen-address=server:9090" in prometheus["command"]
    assert "http://server:9090/-/healthy" in prometheus["healthcheck"]["test"]
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "grafana"
    assert "http://grafana:3000/api/health" in grafana["healthcheck"]["test"]
    assert not [path for path in DEPLOY.rglob("*") if path.is_file() and "0.0.0.0" in path.read_text()]


def test_the_servers_settings_are_those_of_the_plugin_and_name_the_device() -> None:
    words = [resolved(word) for word in SERVICES["server"]["command"]]
    (raw,) = [word.partition("=")[2] for word in words if word.startswith("--additional-config=")]
    settings = NdpSettings.from_mapping(json.loads(raw)["ndp"])
    served = json.loads(one("device", "CMD"))
    assert settings.addresses == (served[served.index("--address") + 1],)
    assert settings.replicas in served


def test_shares_of_decode_pairs_leave_out_the_pairs_of_prompts_wherever_they_ran() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "vllm-ndp.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked.append((DEPLOY / "prometheus" / "ndp-rules.yml").read_text())
    excluded = re.findall(r'where!(?:=|~)"([^"]+)"', "\n".join(asked))
    assert len(excluded) == 5
    for pattern in excluded:
        assert {kind for kind in PAIR_KINDS if re.fullmatch(pattern, kind)} == set(PROMPT_KINDS)


def test_the_unit_of_systemd_starts_what_the_parser_reads() -> None:
    (line,) = re.findall(r"^ExecStart=\S+/ndp-device (.*)$", (DEPLOY / "ndp-device.service").read_text(), re.MULTILINE)
    group: Any = typer.main.get_command(ndp_device)
    context = group.make_context("ndp-device", shlex.split(line))
    _, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    assert command.make_context("serve", rest, parent=context).params["address"].startswith("ipc://")
