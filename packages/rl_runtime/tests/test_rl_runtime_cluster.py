"""Checks that the driver makes before it uses the nodes of a Ray cluster."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from plinth_testing import raises
from rl_data import build_tiny_model
from rl_runtime.errors import InputError, NodeError
from rl_runtime.launch import cluster
from rl_runtime.launch.cluster import NodeReport, _interface_of, check_nodes, read_model_files, read_versions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def node(model: str) -> NodeReport:
    """A node that has what this host has."""
    return NodeReport(
        address="10.0.0.2",
        interface="eth0",
        gpus=(),
        free_memory_bytes=2**30,
        versions=read_versions(),
        model_files=read_model_files(Path(model)),
        sees_mark=True,
    )


def check(node: NodeReport, model: str) -> None:
    check_nodes([node], model_folder=model, shared_folder=Path("/shared"))


def test_equal_nodes_pass(node: NodeReport, model: str) -> None:
    check_nodes([node, node], model_folder=model, shared_folder=Path("/shared"))
    assert {"python", "torch", "deepspeed", "ray", "plinth-rl-runtime", "plinth-ds-engine"} <= set(node.versions)
    assert "missing" not in [node.versions[name] for name in ("torch", "ray", "plinth-rl-runtime", "plinth-ckpt")]


@pytest.mark.parametrize(("name", "version"), [("torch", "1.0"), ("plinth-rl-runtime", "missing"), ("python", "3.9.1")])
def test_other_packages_are_refused(node: NodeReport, model: str, name: str, version: str) -> None:
    other = replace(node, versions={**node.versions, name: version})
    with raises(NodeError, node="10.0.0.2", value={name: version}, allowed=f"{name} {node.versions[name]}"):
        check(other, model)


def test_a_local_output_folder_is_refused(node: NodeReport, model: str) -> None:
    with raises(NodeError, node="10.0.0.2", field="trainer.output_dir", value="/shared"):
        check(replace(node, sees_mark=False), model)


def test_another_model_folder_is_refused(node: NodeReport, model: str) -> None:
    with raises(NodeError, node="10.0.0.2", field="model.path", value=model):
        check(replace(node, model_files={}), model)
    shorter = {name: size for name, size in node.model_files.items() if name != "model.safetensors"}
    other = {**shorter, "config.json": "0" * 16, "more.bin": "7"}
    with raises(NodeError, node="10.0.0.2", field="model.path") as refused:
        check(replace(node, model_files=other), model)
    assert "config.json, model.safetensors, more.bin" in refused.value.problem


def test_a_changed_configuration_of_the_same_size_is_noticed(model: str, tmp_path: Path) -> None:
    before = read_model_files(Path(model))
    config = (Path(model) / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("2", "3", 1))
    assert read_model_files(tmp_path)["config.json"] != before["config.json"]
    assert read_model_files(tmp_path / "nowhere") == {}


def test_auto_is_the_variable_or_the_cluster_of_ray_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "read_ray_address", lambda: None)
    with raises(InputError, field="trainer.ray_address", value="auto"):
        cluster.find_auto_address()
    monkeypatch.setattr(cluster, "read_ray_address", lambda: "10.0.0.2:6379")
    assert cluster.find_auto_address() == "10.0.0.2:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.3:6379")
    assert cluster.find_auto_address() == "10.0.0.3:6379"


def test_the_interface_of_an_address_is_found() -> None:
    loopback = {
        name for name, addresses in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in addresses)
    }
    assert _interface_of("127.0.0.1") in loopback
    with raises(NodeError, node="198.51.100.7"):
        _interface_of("198.51.100.7")
