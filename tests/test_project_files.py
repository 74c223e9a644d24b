"""The files that code hosts read are well-formed, and name commands that exist."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.shown_commands import problems_in
from tests.test_packaging import ROOT, setup_cfg

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
EXPRESSION = re.compile(r"\$\{\{ *([\w.]+) *\}\}")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def each_setting(job: dict[str, Any]) -> list[dict[str, str]]:
    """The values of `matrix` in each run of a job."""
    matrix = job.get("strategy", {}).get("matrix", {})
    axes = {name: values for name, values in matrix.items() if name != "include"}
    settings = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [
        {f"matrix.{name}": value for name, value in setting.items()} for setting in settings + matrix.get("include", [])
    ]


def commands_of(workflow: dict[str, Any]) -> list[str]:
    """Every `run` of a workflow, with the values of its matrix."""
    return [
        EXPRESSION.sub(lambda match, values=values: values[match[1]], step["run"])
        for job in workflow["jobs"].values()
        for values in each_setting(job)
        for step in job["steps"]
        if "run" in step
    ]


def problems_of(command: str) -> list[str]:
    return [] if (ROOT / command).is_file() else problems_in(command)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_versions_of_its_actions_and_commands_that_exist(path: Path) -> None:
    workflow = read(path)
    assert {"name", True, "permissions", "jobs"} <= set(workflow)  # YAML reads `on` as true
    commands = commands_of(workflow)
    assert commands
    assert [problem for command in commands for problem in problems_of(command)] == []
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert "run" in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
            assert "${{ github" not in step.get("run", "")  # a name of a branch may hold commands


def test_a_step_that_names_what_does_not_exist_is_found() -> None:
    job = {"strategy": {"matrix": {"a": ["test", "tset"]}}, "steps": [{"run": "make ${{ matrix.a }}"}]}
    problems = [problems_of(command) for command in commands_of({"jobs": {"one": job}})]
    assert problems == [[], ["make tset: the Makefile has no tset"]]
    assert problems_of(".ci/rum") != []


def test_ci_runs_everything_and_the_pythons_that_setup_cfg_names() -> None:
    commands = commands_of(workflow := read(GITHUB / "workflows" / "ci.yml"))
    assert {".ci/run", "make test-oldest PYTHON=python", "make test-newest PYTHON=python"} <= set(commands)
    named = re.findall(r"Python :: (3\.\d+)", setup_cfg()["metadata"]["classifiers"])
    assert workflow["jobs"]["quick"]["strategy"]["matrix"]["python"] == named
    assert f">={named[0]}" == setup_cfg()["options"]["python_requires"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one_that_code_hosts_show(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels", "title"}
    named = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in named}) == len({field["attributes"]["label"] for field in named}) == len(named)
    for field in form["body"]:
        assert set(field) <= {"type", "id", "attributes", "validations"}
        assert field["type"] in ("markdown", "input", "textarea", "checkboxes")
        known = {"value", "label", "description", "options", "render"}
        assert set(field["attributes"]) <= known
    texts = " ".join(field["attributes"].get("description", "") for field in form["body"])
    shown = re.findall(r"`(hf-speculate [^`]+)`", texts)
    labels = " ".join(field["attributes"].get("label", "") for field in form["body"])
    shown += re.findall(r"Output of (hf-speculate \w+)", labels)
    assert [problem for command in shown for problem in problems_in(command, is_whole=False)] == []


def test_hooks_before_a_commit_are_the_checks_of_make() -> None:
    (source,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert source["repo"] == "local"
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ncheck: ")[2].partition("\n\n")[0]
    checks = {line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()[1:4]}
    assert {hook["entry"].replace(" --force-exclude", "") for hook in source["hooks"]} == {
        check.removesuffix(" .") for check in checks
    }
    assert {hook["language"] for hook in source["hooks"]} == {"system"}


def test_the_citation_names_the_authors_and_the_licence_of_the_package() -> None:
    citation, package = read(ROOT / "CITATION.cff"), setup_cfg()["metadata"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert [author["name"] for author in citation["authors"]] == [package["author"]]
    assert citation["license"] == package["license"]
    assert "version" not in citation  # said once, in hf_speculate/__init__.py
