"""What ``deploy/`` names is there: flags, metrics, paths, ports and versions. No container engine runs here."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tomllib
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from sglang.srt.observability import metrics_collector
from sglang.srt.server_args import ServerArgs

from sglang_freekv.metrics import METRICS, PREFIX
from sglang_freekv.releases import TESTED
from sglang_freekv.scheduler_patch.arguments import add_cli_args

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "freekv.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]


def load(name: str) -> list[dict]:
    """The YAML documents of a file, with compose's variables set to what they default to, or to ``x``."""
    text = re.sub(r"\$\{\w+(?::\?[^}]*|:-(?P<default>[^}]*))?\}", lambda match: match["default"] or "x", (DEPLOY / name).read_text())
    return list(yaml.safe_load_all(text))


COMPOSE = load("compose.yaml")[0]["services"]
DEPLOYMENT, SERVICE = load("kubernetes.yaml")
CONTAINER = DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """The server's own, with the plugin's flags."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    add_cli_args(None, parser)
    return parser


def run_in_the_dockerfile() -> list[str]:
    """What its `docker run` gives the server."""
    command = re.search(r"docker run .*?(?=\n#\n|\n# --)", DOCKERFILE, re.DOTALL)[0]
    words = shlex.split(command.replace("\\\n#", " "))
    return words[next(index for index, word in enumerate(words) if word.startswith("sglang-freekv:")) + 1 :]


COMMANDS = {"compose": COMPOSE["server"]["command"], "kubernetes": CONTAINER["args"], "docker run": run_in_the_dockerfile()}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_the_server_knows_its_flags(parser, words):
    arguments = parser.parse_args(words)
    assert arguments.kv_retrieval == "freekv" and arguments.host == "0.0.0.0" and arguments.model_path.startswith("/models/")
    assert arguments.port in (None, 30000)


def test_every_flag_of_ours_that_is_named_exists(parser):
    named = {flag for file in DEPLOY.rglob("*") if file.is_file() for flag in re.findall(r"--freekv-[a-z-]*[a-z]", file.read_text())}
    assert named and named <= set(parser._option_string_actions)


def test_the_image_is_built_from_what_the_wheel_holds():
    ignored, *let_through = [line.strip("!") for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] != "#"]
    copied = [source for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for source in line.split()[:-1]]
    assert ignored == "*" and all((ROOT / source).exists() and source in let_through for source in copied)
    setuptools, project = PROJECT["tool"]["setuptools"], PROJECT["project"]
    directories = {setuptools["package-dir"].get(package, package).split("/")[0] for package in setuptools["packages"]}
    assert directories | {"pyproject.toml", project["readme"], *project["license-files"]} == set(copied)


def test_the_image_has_the_sglang_that_readme_advises_on_gpus():
    advised = re.search(r"on a GPU put ([\d.]+) here", (ROOT / "README.md").read_text())[1]
    assert re.findall(r"^ARG SGLANG_VERSION=(.*)$", DOCKERFILE, re.MULTILINE) == [advised]
    assert COMPOSE["server"]["build"]["args"] == {"SGLANG_VERSION": advised}
    named = {
        version for file in DEPLOY.rglob("*") if file.is_file() for version in re.findall(r"SGLANG_VERSION=([\d.]+)", file.read_text())
    }
    assert named <= set(TESTED)
    assert "ARG SGLANG_IMAGE=lmsysorg/sglang:v${SGLANG_VERSION}\nFROM ${SGLANG_IMAGE}\n" in DOCKERFILE


def test_services_find_each_other():
    (job,) = load("prometheus.yml")[0]["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:30000"]}] and "--port=30000" in COMPOSE["server"]["command"]
    (source,) = load("grafana/provisioning/datasources/prometheus.yml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSE
    mounted = dict(volume.split(":")[:2] for service in COMPOSE.values() for volume in service["volumes"] if volume.startswith("."))
    assert len(mounted) == 4 and all((DEPLOY / path).exists() for path in mounted)
    (rules,) = load("prometheus.yml")[0]["rule_files"]
    assert mounted[f"./{rules}"] == f"{Path(mounted['./prometheus.yml']).parent}/{rules}"
    (provider,) = load("grafana/provisioning/dashboards/freekv.yml")[0]["providers"]
    assert Path(mounted["./grafana/freekv.json"]).parent == Path(provider["options"]["path"])
    assert mounted["./grafana/freekv.json"] == COMPOSE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]


def test_the_pod_is_what_the_service_asks_for():
    template = DEPLOYMENT["spec"]["template"]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (port,) = CONTAINER["ports"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] == port["name"] and f"--port={port['containerPort']}" in CONTAINER["args"]
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {volume["name"] for volume in template["spec"]["volumes"]}
    (pool,) = [word.split("=")[1] for word in CONTAINER["args"] if word.startswith("--freekv-host-memory=")]
    assert 1.25 * int(pool) < int(CONTAINER["resources"]["limits"]["memory"].removesuffix("Gi"))


SGLANGS = set(re.findall(r'name="(sglang:\w+)"', Path(metrics_collector.__file__).read_text()))


def metrics_in(expression: str) -> set[str]:
    return {re.sub(r"_bucket$", "", name) for name in re.findall(r"sglang:\w+", expression)}


def test_the_dashboard_shows_every_metric_of_ours_and_none_that_does_not_exist():
    shown = set().union(*(metrics_in(target["expr"]) for target in TARGETS))
    ours = {name for name in shown if name.startswith(PREFIX)}
    assert ours == {metric.name for metric in METRICS}
    assert shown - ours and shown - ours <= SGLANGS
    assert metrics_in(json.dumps(DASHBOARD["templating"])) <= ours


def test_alerts_ask_for_metrics_that_exist():
    (group,) = load("alerts.yml")[0]["groups"]
    told = (DEPLOY / "README.md").read_text()
    counters = {metric.name for metric in METRICS if metric.kind == "counter"}
    for rule in group["rules"]:
        expression = rule["expr"]
        assert metrics_in(expression) <= {metric.name for metric in METRICS} | SGLANGS and f"`{rule['alert']}`" in told
        assert expression.count("(") == expression.count(")") and rule["annotations"]["summary"].endswith(".")
        for name in metrics_in(expression):
            changing = name in counters or name.endswith("_total") and name not in {metric.name for metric in METRICS}
            assert len(re.findall(rf"\b(?:rate|increase)\({name}\[", expression)) == expression.count(name) * changing, name


def test_counters_are_shown_as_rates():
    for metric in METRICS:
        for target in TARGETS:
            for found in re.finditer(rf"(rate\()?{metric.name}\b", target["expr"]):
                assert bool(found[1]) == (metric.kind == "counter") or metric.name.endswith("canary_faults_total"), target["expr"]


def test_the_dashboard_is_well_formed():
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert DASHBOARD["schemaVersion"] >= 39 and "datasource" in variables
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    for source in [*PANELS, *TARGETS]:
        assert source["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in TARGETS:
        expression = target["expr"]
        assert expression.count("(") == expression.count(")") > 0 and expression.count("{") == expression.count("}")
        assert set(re.findall(r"\$(\w+)", expression)) <= variables | {"__rate_interval"}


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


def test_a_canary_fault_is_red():
    (panel,) = [panel for panel in PANELS if panel["type"] == "stat" and "canary_faults" in panel["targets"][0]["expr"]]
    assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"] == [{"color": "green", "value": None}, {"color": "red", "value": 1}]
