"""A real Prometheus beside a server, with the rules of deploy/; and what these and the dashboard ask of it."""

import json
import math
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines import ROOT, free_port


@contextmanager
def scraping(server: str, directory: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes the server every second and has the rules of deploy/."""
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("needs Prometheus: apt-get install prometheus (.ci/run does it where it may)")
    scrape = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    assert scrape.count("server:8000") == scrape.count("scrape_interval: 5s") == 1
    assert scrape.count("evaluation_interval: 5s") == 1, "else rules run once a minute"
    target = server.removeprefix("http://")
    scrape = scrape.replace("server:8000", target).replace("interval: 5s", "interval: 1s")
    (directory / "prometheus.yml").write_text(scrape)
    shutil.copyfile(ROOT / "deploy" / "prometheus" / "ndp-rules.yml", directory / "ndp-rules.yml")
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("wb") as log:
        command = [program, *options, f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)
    assert "level=error" not in (directory / "log").read_text()


def expressions(model: str) -> list[str]:
    """Of the dashboard, with Grafana's variables filled in, and of the rules; of an alert, what it compares."""
    rules = (ROOT / "deploy" / "prometheus" / "ndp-rules.yml").read_text()
    found = re.findall(r"^ +expr: (.*)$", rules, re.M) + re.findall(r"^ +- record: (.*)$", rules, re.M)
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "vllm-ndp.json").read_text())
    found += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found = [one.replace("$__rate_interval", "1m").replace("$model", model) for one in found]
    return [re.sub(r" [<>] [0-9.]+$", "", one) for one in found]


def value_of(prometheus: str, expression: str) -> float | None:
    """One finite value of what the expression gives now, None without any."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            samples = json.loads(answer.read())["data"]["result"]
    except urllib.error.HTTPError as error:
        pytest.fail(f"{expression} is no PromQL: {error.read().decode()}")
    except (urllib.error.URLError, ConnectionError):  # it does not listen yet
        return None
    values = [float(sample["value"][1]) for sample in samples]
    return next((value for value in values if math.isfinite(value)), None)
