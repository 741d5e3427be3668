"""Checks that the driver makes before it uses the nodes of a Ray cluster."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rl_data import build_tiny_model
from rl_runtime.errors import InputError
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


def refusal(node: NodeReport, model: str) -> str:
    with pytest.raises(InputError) as refused:
        check_nodes([node], model_folder=model, shared_folder=Path("/shared"))
    return str(refused.value)


def test_equal_nodes_pass(node: NodeReport, model: str) -> None:
    check_nodes([node, node], model_folder=model, shared_folder=Path("/shared"))
    assert {"python", "torch", "deepspeed", "ray", "plinth-rl-runtime", "plinth-ds-engine"} <= set(node.versions)
    assert "missing" not in [node.versions[name] for name in ("torch", "ray", "plinth-rl-runtime", "plinth-ckpt")]


@pytest.mark.parametrize(("name", "version"), [("torch", "1.0"), ("plinth-rl-runtime", "missing"), ("python", "3.9.1")])
def test_other_packages_are_refused(node: NodeReport, model: str, name: str, version: str) -> None:
    error = refusal(replace(node, versions={**node.versions, name: version}), model)
    assert error.startswith(f"Ray node 10.0.0.2 has {name} {version} instead of {node.versions[name]}")


def test_a_local_output_folder_is_refused(node: NodeReport, model: str) -> None:
    error = refusal(replace(node, sees_mark=False), model)
    assert error.startswith("trainer.output_dir: got '/shared'; Ray node 10.0.0.2 does not share it with this host")


def test_another_model_folder_is_refused(node: NodeReport, model: str) -> None:
    assert "it is missing on Ray node 10.0.0.2" in refusal(replace(node, model_files={}), model)
    shorter = {name: size for name, size in node.model_files.items() if name != "model.safetensors"}
    other = {**shorter, "config.json": "0" * 16, "more.bin": "7"}
    error = refusal(replace(node, model_files=other), model)
    assert "it differs in config.json, model.safetensors, more.bin on Ray node 10.0.0.2" in error


def test_a_changed_configuration_of_the_same_size_is_noticed(model: str, tmp_path: Path) -> None:
    before = read_model_files(Path(model))
    config = (Path(model) / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("2", "3", 1))
    assert read_model_files(tmp_path)["config.json"] != before["config.json"]
    assert read_model_files(tmp_path / "nowhere") == {}


def test_the_interface_of_an_address_is_found() -> None:
    loopback = {
        name for name, addresses in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in addresses)
    }
    assert _interface_of("127.0.0.1") in loopback
    with pytest.raises(InputError, match=r"no network interface of this node has the address 198\.51\.100\.7"):
        _interface_of("198.51.100.7")
