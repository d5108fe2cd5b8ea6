from pathlib import Path

import pytest

from plimsoll_local import binaries


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLIMSOLL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    return tmp_path / "home"


def make_programs(folder: Path, names: list[str], prints: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        program = folder / name
        program.write_text(f"#!/bin/sh\necho '{prints}'\n")
        program.chmod(0o755)


ALL = [program.name for program in binaries.PROGRAMS]


def test_the_cache_is_looked_into(home: Path) -> None:
    folder = home / "bin" / binaries.cache_key()
    make_programs(folder, ALL)
    found = binaries.find_binaries()
    assert found is not None
    assert found.kube_apiserver == folder / "kube-apiserver"
    assert found.helm == folder / "helm"


def test_assets_come_first_and_the_cache_fills_up(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_programs(tmp_path / "assets", ["etcd", "kube-apiserver", "kubectl"])
    make_programs(home / "bin" / binaries.cache_key(), ALL)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    found = binaries.find_binaries()
    assert found is not None
    assert found.etcd.parent == tmp_path / "assets"
    assert found.helm.parent == home / "bin" / binaries.cache_key()


@pytest.mark.parametrize(
    ("program", "prints", "taken"),
    [
        ("kube-apiserver", "Kubernetes v1.36.0", True),
        ("kube-apiserver", "Kubernetes v1.35.3", False),
        ("kubectl", "Client Version: v1.36.2", True),
        ("etcd", "etcd Version: 3.6.1", True),
        ("etcd", "etcd Version: 3.5.21", False),
        ("helm", "v4.0.1+g1234567", True),
        ("helm", "v3.19.0+g1234567", False),
        ("helm", "no version at all", False),
    ],
)
def test_on_path_only_the_pinned_release_counts(
    home: Path, tmp_path: Path, program: str, prints: str, taken: bool
) -> None:
    make_programs(home / "bin" / binaries.cache_key(), [name for name in ALL if name != program])
    make_programs(tmp_path / "path", [program], prints)
    found = binaries.find_binaries()
    assert (found is not None) == taken
    if found is not None:
        assert f"{program} from {tmp_path / 'path'}" in found.describe()


@pytest.mark.parametrize("missing", ALL)
def test_one_missing_program_is_not_found(home: Path, missing: str) -> None:
    make_programs(home / "bin" / binaries.cache_key(), [name for name in ALL if name != missing])
    assert binaries.find_binaries() is None


def test_without_go_and_uv_the_message_says_what_to_do(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("UV", raising=False)
    with pytest.raises(binaries.MissingTool, match="run this through `make`"):
        binaries.ensure_binaries(lambda line: None)


def test_an_old_go_is_not_taken(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    go = folder / "go"
    go.write_text("#!/bin/sh\necho go version go1.19.8 linux/amd64\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("UV", raising=False)
    with pytest.raises(binaries.MissingTool):
        binaries.ensure_binaries(lambda line: None)
